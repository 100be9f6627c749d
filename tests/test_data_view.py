"""What inspect_data shows of a batch."""

import re

import pytest
from data_helpers import (
    SIDE,
    make_config,
    make_pipeline,
    record,
    take,
    write_image,
    write_json,
)

from bluelm_jax import schemes
from bluelm_jax.data_config import Packing
from experiments import data_view


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    name = write_image(folder, "a.png", 28, 28)
    records = [record("a", "<image>\nWhat <b>?", "A </s> tag", image=name), record("b", "Q", "Yes")]
    return write_json(folder / "a.json", records)


def first_batch(path, **fields):
    defaults = {"shuffle": False, "batch_size": 1, "packing": Packing(), "tiles_per_group": 3}
    pipeline = make_pipeline(path, **(defaults | fields))
    return next(iter(pipeline)), pipeline.tokenizer


def test_spans_cover_the_row_by_kind_and_sample(path):
    batch, tokenizer = first_batch(path, seq_len=120)
    found = data_view.spans(batch, 0)
    assert [span.start for span in found][1:] == [span.stop for span in found][:-1]
    assert (found[0].start, found[-1].stop) == (0, 120)
    shown = [
        (span.kind, span.segment, data_view.span_text(batch, 0, span, tokenizer, SIDE**2))
        for span in found
    ]
    assert shown[:7] == [
        ("text", 1, "<s>[|Human|]:"),
        ("image", 1, "[image: 8 tokens, tiles 0-1]"),
        ("text", 1, "\nWhat <b>?[|AI|]:"),
        ("target", 1, "A </s> tag</s>"),
        ("text", 2, "<s>[|Human|]:Q[|AI|]:"),
        ("target", 2, "Yes</s>"),
        ("text", 3, "<s>[|Human|]:Q[|AI|]:"),
    ]
    assert shown[-1] == ("padding", 0, f"[{120 - found[-1].start} padding]")


def test_newlines_and_several_tiles(tmp_path):
    name = write_image(tmp_path, "a.png", 56, 28)
    path = write_json(tmp_path / "a.json", [record("a", "<image>", "A", image=name)])
    batch, tokenizer = first_batch(path, layout=schemes.UnpadNewline(), packing=None)
    text = data_view.terminal(batch, tokenizer, SIDE**2, color=False)
    assert "[newline]" in text and "tiles 0-" in text


def test_terminal_marks_targets(path):
    batch, tokenizer = first_batch(path, seq_len=120)
    plain = data_view.terminal(batch, tokenizer, SIDE**2, color=False)
    assert "| sample 1: <s>[|Human|]:[image: 8 tokens, tiles 0-1]" in plain
    assert "«A </s> tag</s>»" in plain and "«Yes</s>»" in plain
    colored = data_view.terminal(batch, tokenizer, SIDE**2)
    assert re.sub(r"\x1b\[[\d;]*m", "", colored) == re.sub("[«»]", "", plain)
    assert "\x1b[30;42mYes</s>\x1b[0m" in colored


def test_page_escapes_text_and_shows_used_tiles(path):
    batch, tokenizer = first_batch(path, seq_len=120, tiles_per_group=6)
    page = data_view.page(batch, tokenizer, SIDE**2, "a <title>")
    assert "a &lt;title&gt;" in page and "What &lt;b&gt;?" in page and "<b>" not in page
    used = batch["tiles"].any(axis=(2, 3, 4)).sum()
    assert page.count("data:image/png;base64,") == used < 6
    assert f"{used} of 6 tiles" in page


def test_show_skips_batches_and_writes_the_page(path, tmp_path):
    config = make_config(path, epochs=2, batch_size=1)
    html = tmp_path / "page.html"
    options = {"side": SIDE, "html_path": str(html), "color": False}
    text = data_view.show(config, skip=1, batches=2, **options)
    assert re.findall(r"^batch \d", text, re.M) == ["batch 1", "batch 2"]
    assert "samples 3" in text and "<h1>Batch 2</h1>" in html.read_text()
    batches = take(iter(make_pipeline(path, epochs=2, batch_size=1)), 2)
    tokenizer = make_pipeline(path).tokenizer
    assert data_view.terminal(batches[1], tokenizer, SIDE**2, color=False) in text
    with pytest.raises(ValueError, match="--skip=9: the data ends"):
        data_view.show(config, skip=9, batches=1, **options)
