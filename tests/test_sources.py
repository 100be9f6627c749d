"""Random access to records in JSON arrays and JSON lines."""

import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bluelm_jax.data.sources import FileRecords, MemoryRecords

TRICKY = [
    {"id": 0, "value": 'brackets ]}[{ and "quotes" and \\ backslash \\" \\\\'},
    {"id": 1, "nested": {"a": [1, {"b": []}], "c": {}}, "text": "图\n\u2028é😀"},
    {"id": 2},
    {"id": 3, "empty": "", "list": [[], [[]]], "esc": "\u0041\\"},
]
json_values = st.recursive(
    st.none() | st.integers() | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=8,
)


def write(path, records, kind, **options):
    if kind == "array":
        path.write_text(json.dumps(records, **options), encoding="utf-8")
    else:
        lines = [json.dumps(r, ensure_ascii=options.get("ensure_ascii", True)) for r in records]
        path.write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["array", "lines"])
@pytest.mark.parametrize("options", [{}, {"indent": 2}, {"ensure_ascii": False}])
def test_reads_every_record(tmp_path, kind, options):
    records = FileRecords(write(tmp_path / "a.json", TRICKY, kind, **options))
    assert len(records) == 4
    assert [records[i] for i in (3, 0, 2, 1)] == [TRICKY[i] for i in (3, 0, 2, 1)]


@given(st.lists(st.dictionaries(st.text(max_size=6), json_values, max_size=4), min_size=1))
def test_any_json_is_found(tmp_path_factory, expected):
    folder = tmp_path_factory.mktemp("a")
    for kind in ("array", "lines"):
        records = FileRecords(write(folder / kind, expected, kind))
        assert [records[i] for i in range(len(records))] == expected


def test_index_file_is_shared_and_follows_the_data(tmp_path):
    path = write(tmp_path / "a.json", TRICKY, "array")
    index_dir = str(tmp_path / "index")
    first = FileRecords(path, index_dir)
    again = FileRecords(path, index_dir)
    assert isinstance(again._spans, np.memmap)
    assert [again[i] for i in range(4)] == TRICKY
    (index,) = (tmp_path / "index").iterdir()
    assert pickle.loads(pickle.dumps(first))[2] == TRICKY[2]
    assert len(pickle.dumps(first)) < 500
    write(path, TRICKY[:2] * 8, "array")
    assert len(FileRecords(path, index_dir)) == 16
    assert len(list((tmp_path / "index").iterdir())) == 2 and index.exists()


def test_pickle_opens_the_file_again(tmp_path):
    path = write(tmp_path / "a.jsonl", TRICKY * 100, "lines")
    data = pickle.dumps(FileRecords(path))
    assert len(data) < 400 * 16 + 1000 < path.stat().st_size
    assert pickle.loads(data)[399] == TRICKY[3]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "the file is empty"),
        (" \n ", "only white space"),
        ('[{"id": 1}, {"id": 2}', r"not closed \(1 whole records in 21 bytes\)|not closed"),
        ('[{"id": 1}, {"id": "x', "not closed"),
    ],
)
def test_broken_files_are_named(tmp_path, content, message):
    path = tmp_path / "broken.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"broken\.json: .*{message}"):
        FileRecords(path)


def test_missing_file_and_bad_records_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json: no such file"):
        FileRecords(tmp_path / "none.json")
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n{"id": }\n[1]\n')
    records = FileRecords(path)
    assert records[0] == {"id": 1}
    with pytest.raises(ValueError, match=r"a\.jsonl\[1\] \(byte 10\): not valid JSON"):
        records[1]
    with pytest.raises(ValueError, match=r"a\.jsonl\[2\] \(byte 19\): .* must be an object"):
        records[2]


def test_memory_records():
    records = MemoryRecords(TRICKY, "toy")
    assert (len(records), records[1], records.where(1)) == (4, TRICKY[1], "toy[1]")
