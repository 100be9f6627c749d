"""The validator's sources, options and reports; `test_messy_data` has the kinds of defect."""

import json
import math
import pathlib
import pickle
import re
from typing import get_args

import numpy as np
import pytest
from data_helpers import SIDE, make_config, record, write_dataset, write_image, write_json
from hypothesis import given, settings
from hypothesis import strategies as st

from bluelm_jax.data import duplicates, validation
from bluelm_jax.data.findings import KINDS, SEVERITIES, Finding
from bluelm_jax.data.images import BadImageKind
from bluelm_jax.data.sources import InvalidRecordError
from bluelm_jax.data.validation import Options
from bluelm_jax.data_config import SourceConfig
from experiments import validation_report

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "data.md"


def sources(*paths):
    return tuple(SourceConfig(path=str(path)) for path in paths)


def check(config, **options):
    found = []
    report = validation.validate(
        config, side=SIDE, options=Options(**options), on_finding=found.append
    )
    return report, found


def test_clean_data_has_no_finding(tmp_path):
    report, found = check(make_config(write_dataset(tmp_path, count=6)), decode=True)
    assert found == [] and report.count("info") == 0 and not report.partial
    (source,) = report.sources
    assert (source.records, source.checked, source.counters["samples"]) == (6, 6, 6)
    assert sum(source.lengths.values()) == sum(source.views.values()) == 6
    assert "6 of 6 records checked" in next(validation_report.lines(report))


def test_files_that_cannot_be_read_do_not_stop_the_others(tmp_path):
    good = write_json(tmp_path / "good.json", [record("a", "Q", "A")])
    bad = {
        "none.json": None,
        "empty.json": "",
        "blank.json": "\n ",
        "cut.json": '[{"id": "a"}, {"id"',
        "nothing.json": "[]",
    }
    for name, text in bad.items():
        if text is not None:
            (tmp_path / name).write_text(text)
    report, found = check(make_config(sources(*(tmp_path / n for n in bad), good)))
    assert {(f.kind, pathlib.Path(f.source).name) for f in found} == {
        ("unreadable_source", "none.json"),
        ("unreadable_source", "empty.json"),
        ("unreadable_source", "blank.json"),
        ("unreadable_source", "cut.json"),
        ("empty_source", "nothing.json"),
    }
    assert report.count() == 5 and report.sources[-1].checked == 1
    assert all(f.record is None and str(f.source) not in f.detail for f in found)


def test_workers_give_the_same_report(tmp_path):
    write_image(tmp_path, "a.png")
    samples = [record(f"s{i % 70}", "<image>", f"A{i % 90}", image="a.png") for i in range(150)]
    samples[5]["image"] = "none.png"
    config = make_config(write_json(tmp_path / "a.json", samples))
    (alone, found), (several, same) = check(config), check(config, workers=2)
    assert found == same and len(found) == 140
    assert alone == several
    assert alone.sources[0].kinds == {
        "image_missing": 1,
        "duplicate_id": 80,
        "duplicate_sample": 59,  # Record 95 is the first of its kind: 5 lost its image.
    }


def test_limit_and_number_of_examples(tmp_path):
    path = write_json(tmp_path / "a.json", [record(f"{i}", "Q", "") for i in range(9)])
    report, found = check(make_config(path), limit=5, max_examples=2)
    (source,) = report.sources
    assert (source.records, source.checked) == (9, 5)
    assert [f.record for f in found if f.kind == "nothing_supervised"] == [0, 1, 2, 3, 4]
    assert [f.record for f in source.examples["nothing_supervised"]] == [0, 1]
    assert "    and 3 more" in list(validation_report.lines(report))


def test_duplicates_within_and_across_files(tmp_path):
    """Equal ids count within a file, equal samples everywhere."""
    one = write_json(tmp_path / "1.json", [record("a", "Q", "A"), record("b", "Q2", "A")])
    two = write_json(tmp_path / "2.json", [record("a", "Q3", "A"), record("c", "Q2", "A")])
    report, found = check(make_config(sources(one, two)))
    (only,) = found
    assert (only.kind, only.source, only.record, only.id) == (
        "duplicate_sample",
        str(two),
        1,
        "'c'",
    )
    assert only.detail == f"as record 1 of {one}"
    assert report.count() == 0 and report.count("warning") == 1


def test_stopping_early_is_partial(tmp_path):
    path = write_json(tmp_path / "a.json", [record(f"{i}", "Q", f"A{i}") for i in range(200)])
    seen = []
    report = validation.validate(
        make_config(path),
        side=SIDE,
        on_progress=lambda done, total: seen.append((done, total)),
        should_stop=lambda: len(seen) == 2,
    )
    assert report.partial and 0 < report.sources[0].checked < 200
    assert seen == [(0, 200), (report.sources[0].checked, 200)]
    assert "partial" in list(validation_report.lines(report))[-1]
    assert validation_report.to_json(report, Options())["partial"] is True


def test_min_side_and_template_decide_warnings(tmp_path):
    write_image(tmp_path, "a.png", 30, 20)
    sample = record("a", "<image> <AI> or [|AI|]: or USER:", "Yes.", image="a.png")
    path = write_json(tmp_path / "a.json", [sample])
    for options, fields, kinds in (
        ({}, {}, ["special_token_in_text"]),
        ({"min_side": 21}, {}, ["special_token_in_text", "image_tiny"]),
        ({}, {"template": "minicpm"}, ["special_token_in_text"]),
        ({}, {"template": "plain"}, []),
    ):
        _, found = check(make_config(path, **fields), **options)
        assert [f.kind for f in found] == kinds
        shown = {"minicpm": "'<AI>'"}.get(fields.get("template"), "'[|AI|]:'")
        assert not kinds or found[0].detail == shown


def test_a_template_that_needs_a_missing_token_is_an_error(tmp_path):
    path = write_json(tmp_path / "a.json", [record("a", "Q", "A")])
    with pytest.raises(ValueError, match=r"'chatml' needs the token '<\|im_start\|>'"):
        check(make_config(path, template="chatml"))


@given(st.lists(st.integers(0, 5), max_size=30))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_repeats_are_all_but_the_first_of_each(values):
    found = duplicates.repeats(np.array(values, np.uint64))
    assert found == [
        (i, values.index(v)) for i, v in enumerate(values) if v and i > values.index(v)
    ]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=40))
@settings(max_examples=50, derandomize=True, deadline=None)
def test_percentiles_are_nearest_ranks(values):
    shown = validation_report.percentiles(validation.collections.Counter(values))
    for percent, value in shown.items():
        below = sum(v < value for v in values) / len(values) * 100
        reached = sum(v <= value for v in values) / len(values) * 100
        assert below <= percent <= reached or (percent == 0 and value == min(values))


def test_every_kind_is_documented():
    rows = dict(re.findall(r"^\| `(\w+)` \| (error|warning|info) \|", DOCS.read_text(), re.M))
    assert rows == {name: kind.severity for name, kind in KINDS.items()}
    assert {kind.severity for kind in KINDS.values()} == set(SEVERITIES)


def test_a_finding_is_one_printable_line():
    finding = Finding("bad_value", "a.json", 3, "'x\x1b[31m'", "turn 1", "", "", "got\n\u202e")
    assert finding.line() == "record 3 'x\\x1b[31m': turn 1: got\\n\\u202e"


def test_report_files(tmp_path):
    path = write_json(tmp_path / "a.json", [record("a", "Q", "")])
    target = tmp_path / "out" / "check.json"
    with validation_report.finding_writer(str(target)) as on_finding:
        report = validation.validate(make_config(path), side=SIDE, on_finding=on_finding)
    validation_report.write(str(target), report, Options())
    summary = json.loads(target.read_text())
    lines = [
        json.loads(t) for t in (tmp_path / "out" / "check.findings.jsonl").read_text().splitlines()
    ]
    assert summary["findings"] == "check.findings.jsonl" and [e["kind"] for e in lines] == [
        "nothing_supervised",
        "empty_answer",
    ]
    assert lines[0]["where"].startswith(f"{path}[0]") and lines[0]["severity"] == "error"
    assert summary["counts"] == {"error": 1, "warning": 1, "info": 0}


@pytest.mark.parametrize("report", ["a.json", "b.json", "c/../a.json"])
def test_a_report_is_never_written_over_the_data(report, tmp_path):
    sources = [str(tmp_path / "a.json"), str(tmp_path / "b.findings.jsonl")]
    with pytest.raises(ValueError, match="would write over the data in"):
        validation_report.check_target(str(tmp_path / report), sources)
    validation_report.check_target(str(tmp_path / "d.json"), sources)


def test_every_way_an_image_can_be_bad_has_a_kind():
    assert {f"image_{kind}" for kind in get_args(BadImageKind)} <= {
        name for name, kind in KINDS.items() if kind.severity == "error"
    }


def test_kind_and_place_of_an_error_reach_the_main_process():
    error = pickle.loads(pickle.dumps(InvalidRecordError("a.json[3]: x", "bad_value", "turn 1")))
    assert (str(error), error.kind, error.place) == ("a.json[3]: x", "bad_value", "turn 1")


def test_half_a_surrogate_pair_in_an_image_name_is_a_finding(tmp_path):
    bad = record("s", "<image>q", "a", image="a\ud800.png")
    path = write_json(tmp_path / "a.json", [bad, record("t", "q", "a")])
    report, _ = check(make_config(sources(path)))
    assert report.sources[0].kinds["image_bad_name"] == 1 and report.sources[0].checked == 2


def test_a_report_is_no_folder_and_not_inside_one_that_is_read(tmp_path):
    (tmp_path / "shards").mkdir()
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    for name in ("shards", "shards/manifest.json", "image.png"):
        with pytest.raises(ValueError, match="--report="):
            validation_report.check_target(str(tmp_path / name), [str(tmp_path / "shards")])


@pytest.mark.parametrize(
    ("field", "value"), [("weight", math.inf), ("repeat", math.inf), ("first", 2.5)]
)
def test_numbers_of_a_source_are_finite_and_whole(field, value):
    with pytest.raises(ValueError, match=f"SourceConfig.{field} = {value}"):
        SourceConfig(path="a", **{field: value})


def test_one_name_in_two_folders_is_two_images(tmp_path):
    paths = []
    for i, folder in enumerate((tmp_path / "a", tmp_path / "b")):
        folder.mkdir()
        write_image(folder, "1.png", seed=i)
        paths.append(write_json(folder / "x.json", [record("s", "<image>q", "a", image="1.png")]))
    report, found = check(make_config(sources(*paths)))
    assert report.count("info") == 0 and not found
