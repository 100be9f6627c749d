"""Every line of the table of records in docs/data.md, from the file to the tokens and targets."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
from data_helpers import SIDE, TILING, make_config, record, turn, write_image, write_json

from bluelm_jax import schemes
from bluelm_jax.data.array_records import array_record_module, encode
from bluelm_jax.data.examples import Example, Skipped
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data.tokenizer import ByteTokenizer
from bluelm_jax.data_config import SourceConfig

BYTES = ByteTokenizer()
DOCS = pathlib.Path(__file__).parent.parent / "docs" / "data.md"
OUTSIDE = record("a", "<image>Q", "A", image="../a.png")
ABSOLUTE = record("a", "<image>Q", "A", image="/a.png")


def talk(*turns, **entries):
    return {"id": "a", "conversations": list(turns), **entries}


# Line of the table: records with the text they become, ~ for an image and [ ] around the targets.
TEXTS = {
    "several images": [
        (record("a", "<image>x<image>Q", "A", image=["a.png", "b.png"]), "U:~x~QB:[A$]"),
    ],
    "`<image>` in the middle or at the end": [
        (record("a", "x <image> y<image>", "A", image=["a.png", "b.png"]), "U:x ~ y~B:[A$]"),
        (record("a", "Q", "A", "R<image>", "B", image="a.png"), "U:QB:[A$]U:R~B:[B$]"),
    ],
    "no `image` key, or null": [
        (record("a", "Q", "A", **entry), "U:QB:[A$]")
        for entry in ({}, {"image": None}, {"image": ""}, {"image": []})
    ],
    "other keys": [
        (record("a", "Q", "A", model="x", weight=[1]), "U:QB:[A$]"),
        (talk(turn("human", "Q") | {"x": 1}, turn("gpt", "A")), "U:QB:[A$]"),
    ],
    "turns before the first human turn": [
        (talk(turn("gpt", "x"), turn("gpt", "y"), turn("human", "Q"), turn("gpt", "A")),
         "U:QB:[A$]"),
    ],
    "one speaker several times": [
        (talk(turn("human", "Q"), turn("human", "R"), turn("gpt", "A"), turn("gpt", "B")),
         "U:QU:RB:[A$]B:[B$]"),
    ],
    "empty answer": [(record("a", "Q", " \n", "R", "B"), "U:QB:$U:RB:[B$]")],
    "empty human turn": [
        (record("a", " ", "A"), "U:B:[A$]"),
        (record("a", "<image>\n", "A", image="a.png"), "U:~B:[A$]"),
    ],
    "white space around a turn": [(record("a", " Q\n\n", "\tA b "), "U:QB:[A b$]")],
    "special tokens written": [(record("a", "</s>", "<s>A"), "U:</s>B:[<s>A$]")],
}  # fmt: skip
SKIPPED = {
    "other number of `<image>`": [
        (record("a", "Q", "A", image="a.png"), "invalid_record"),
        (record("a", "<image><image>Q", "A", image="a.png"), "invalid_record"),
        (record("a", "<image>Q", "A"), "invalid_record"),
    ],
    "`system` as first turn": [
        (talk(turn("system", "S"), turn("human", "Q"), turn("gpt", "A")), "invalid_record"),
        (talk(turn("human", "Q"), turn("system", "S"), turn("gpt", "A")), "invalid_record"),
    ],
    "no supervised token": [
        (record("a", "Q", ""), "invalid_record"),
        (record("a", "Q"), "invalid_record"),
    ],
    "unknown speaker": [
        (talk(turn("narrator", "Q"), turn("gpt", "A")), "invalid_record"),
        (talk(turn("human", 3), turn("gpt", "A")), "invalid_record"),
        (talk("Q", turn("gpt", "A")), "invalid_record"),
        ({"id": "a"}, "invalid_record"),
        (talk(), "invalid_record"),
        (talk(turn("gpt", "A")), "invalid_record"),
    ],
    "`image` of another type": [
        (record("a", "<image>Q", "A", image=entry), "invalid_record")
        for entry in (7, {"path": "a.png"}, ["a.png", None], [""])
    ],
    "an image path that is absolute": [
        (OUTSIDE, "unreadable_image"), (ABSOLUTE, "unreadable_image"),
    ],
}  # fmt: skip


def made_of(folder, sample, kind):
    """The outcome of a sample that is alone in its file."""
    for name in ("a.png", "b.png"):
        write_image(folder, name)
    if kind == "json":
        path = write_json(folder / "one.json", [sample])
    else:
        path = folder / "one.array_record"
        writer = array_record_module().ArrayRecordWriter(str(path), "group_size:1")
        writer.write(encode(sample))
        writer.close()
    policies = {"on_invalid_record": "skip", "on_unreadable_image": "skip"}
    one_view = dataclasses.replace(TILING, scheme=schemes.Fixed())
    config = make_config((SourceConfig(path=str(path), tiling=one_view),), **policies)
    pipeline = Pipeline(config, side=SIDE)
    (source,), (records,) = config.sources, pipeline.records
    return pipeline.maker.make(records[0], source, records.where(0))


def shown(example):
    """Text with short marks for markers, ~ for the positions of an image, [ ] around targets."""
    parts, at = [], 0
    edges = np.flatnonzero(np.diff(example.supervised)) + 1
    for stop in [*edges, example.length]:
        ids = example.tokens[at:stop].tolist()
        ids = [BYTES.encode("~")[0] if i == BYTES.pad_id else i for i in ids]
        text = "".join("$" if i == BYTES.eos_id else BYTES.token_text(i) for i in ids)
        parts.append(f"[{text}]" if example.supervised[at] else text)
        at = stop
    text = "".join(parts).removeprefix("<s>").replace("~" * SIDE**2, "~")
    return text.replace("[|Human|]:", "U:").replace("[|AI|]:", "B:")


def cases(table):
    return [
        pytest.param(sample, expected, id=f"{line}, {i}")
        for line, samples in table.items()
        for i, (sample, expected) in enumerate(samples)
    ]


@pytest.mark.parametrize("kind", ["json", "shard"])
@pytest.mark.parametrize(("sample", "expected"), cases(TEXTS))
def test_what_a_record_becomes(tmp_path, sample, expected, kind):
    made = made_of(tmp_path, sample, kind)
    assert isinstance(made, Example) and shown(made) == expected
    entry = sample.get("image") or []
    assert made.num_views == (len(entry) if isinstance(entry, list) else 1)
    leading = "turns_left_out" in json.dumps(made.events)
    assert leading == (sample["conversations"][0]["from"] == "gpt")


@pytest.mark.parametrize(("sample", "reason"), cases(SKIPPED))
def test_what_is_left_out_and_why(tmp_path, sample, reason):
    made = made_of(tmp_path, sample, "json")
    assert isinstance(made, Skipped) and made.reason == reason
    assert "sample 'a' of" in made.detail and "one.json[0]" in made.detail


def test_every_line_of_the_table_is_tested():
    section = DOCS.read_text().split("## Records")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][1:]
    for name in (*TEXTS, *SKIPPED):
        matching = [line for line in lines if name in line.split(" | ")[0]]
        assert len(matching) == 1, name
        lines.remove(matching[0])
    assert not lines
