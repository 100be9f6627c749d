"""Validation finds every kind of bad record and names it."""

import json

import pytest
from data_helpers import SIDE, make_config, record, write_image

from bluelm_jax.data import validation


@pytest.fixture
def path(tmp_path):
    write_image(tmp_path, "a.png", 56, 56)
    write_image(tmp_path, "big.png", 84, 84)
    (tmp_path / "torn.png").write_bytes((tmp_path / "a.png").read_bytes()[:2000])
    texts = ("<image>", "A")
    lines = [
        record("good", *texts, image="a.png"),
        record("good", "Q", "A"),
        record("missing", *texts, image="none.png"),
        record("torn", *texts, image="torn.png"),
        record("big", *texts, image="big.png"),
        record("long", "Q" * 500, "A"),
        record("count", "Q", "A", image="a.png"),
        record("empty", "Q", ""),
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([*map(json.dumps, lines), '{"id": ']))
    return path


def test_headers_alone(path):
    (report,) = validation.validate(make_config(path, tiles_per_group=6), side=SIDE)
    assert report.counters.counts == {
        "samples": 9,
        "duplicate_id": 1,
        "unreadable_image": 1,
        "too_many_tiles": 1,
        "overlong": 1,
        "invalid_record": 3,
    }
    assert report.problems == 7
    assert len(report.lengths) == len(report.views) == 3
    text = "\n".join(report.lines())
    for name in ("'missing'", "'big'", "'long'", "'count'", "'empty'", "a.jsonl[8]"):
        assert name in text
    assert "'good' again at" in text and "'torn'" not in text


def test_decoding_finds_damaged_pixels(path):
    (report,) = validation.validate(make_config(path, tiles_per_group=6), side=SIDE, decode=True)
    assert report.counters.counts["unreadable_image"] == 2
    assert "'torn'" in "\n".join(report.counters.names["unreadable_image"])


def test_limit_and_clean_data(path):
    (report,) = validation.validate(make_config(path, tiles_per_group=6), side=SIDE, limit=1)
    assert (report.problems, len(report.lengths)) == (0, 1)
    assert next(report.lines()).endswith("a.jsonl: 1 records")
