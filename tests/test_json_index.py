"""What JSON files hold besides plain records: marks, encodings, separators, items of other types."""

import gzip
import json

import pytest

from bluelm_jax.data.sources import FileRecords, InvalidRecordError, image_files, sample_name

TWO = [{"id": 1, "x": "a"}, {"id": 2, "x": "b"}]


def written(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def read(path):
    records = FileRecords(path)
    return [records[i] for i in range(len(records))]


ARRAY = json.dumps(TWO)
LINES = "\n".join(map(json.dumps, TWO))


@pytest.mark.parametrize("text", [ARRAY, LINES], ids=["array", "lines"])
def test_byte_order_mark_is_passed_over(tmp_path, text):
    assert read(written(tmp_path / "a.json", b"\xef\xbb\xbf" + text.encode())) == TWO


@pytest.mark.parametrize(
    "text",
    [LINES, LINES + "\n", LINES.replace("\n", "\r\n") + "\r\n", f"\n\n{LINES}\r\n  \n\t\n"],
    ids=["no last newline", "newline", "CR LF", "blank lines"],
)
def test_line_ends(tmp_path, text):
    assert read(written(tmp_path / "a.jsonl", text)) == TWO


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_other_encodings_are_refused(tmp_path, encoding):
    path = written(tmp_path / "a.json", ARRAY.encode(encoding))
    with pytest.raises(ValueError, match=r"a\.json: the text is UTF-16 or UTF-32; convert"):
        FileRecords(path)


def test_compressed_files_are_refused(tmp_path):
    path = written(tmp_path / "a.json.gz", gzip.compress(ARRAY.encode()))
    with pytest.raises(ValueError, match=r"a\.json\.gz: the file is compressed \(gzip\)"):
        FileRecords(path)


@pytest.mark.parametrize(
    ("item", "kind"),
    [("5", "int"), ("-1.5e3", "float"), ('"a, ]}"', "str"), ("null", "NoneType"), ("true", "bool"),
     ("[1, {}]", "list"), ("[]", "list")],
)  # fmt: skip
def test_items_of_other_types_are_invalid_records_at_their_index(tmp_path, item, kind):
    path = written(tmp_path / "a.json", f'[{{"id": 1}} ,{item},\n{{"id": 2}}, {item} ]\n')
    records = FileRecords(path)
    assert (len(records), records[0], records[2]) == (4, {"id": 1}, {"id": 2})
    for index in (1, 3):
        with pytest.raises(InvalidRecordError, match=rf"\[{index}\] .* object, got {kind}$"):
            records[index]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"id": 1}]\n{"id": 2}', r"byte 12: the array of 1 records is closed.*goes on with '{"),
        ('[{"id": 1}]]', r"byte 11: the array of 1 records is closed"),
        ("[] []", r"byte 3: the array of 0 records is closed"),
        ('[{"id": 1} {"id": 2}]', r"byte 11: expected ',' or '\]' after 1 records, got '{"),
        ('[{"id": 1}, ]', r"byte 12: expected a record, got '\]'"),
        ('[,{"id": 1}]', r"byte 1: expected a record, got ',{"),
        ('[{"id": 1}}', r"byte 10: expected ',' or '\]' after 1 records, got '}'"),
        ('[{"id": 1}, {"id": 2}', r"not closed \(2 whole records in 21 bytes\)"),
        ('[{"id": 1}, {"id"', r"not closed \(1 whole records in 17 bytes\)"),
        ('[{"id": 1},', r"not closed \(1 whole records in 11 bytes\)"),
        ("[", r"not closed \(0 whole records in 1 bytes\)"),
    ],
)
def test_what_is_wrong_between_records_is_named_with_its_byte(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"a\.json: (the array is )?{message}"):
        FileRecords(written(tmp_path / "a.json", text))


def test_empty_arrays(tmp_path):
    for text in ("[]", " [ ] \n"):
        assert len(FileRecords(written(tmp_path / "a.json", text))) == 0


@pytest.mark.parametrize("depth", [1, 3, 4, 5, 40])
def test_any_depth_of_brackets(tmp_path, depth):
    value = {"id": "]}"}
    for _ in range(depth):
        value = {"a": [value, "["]}
    records = [value, {"id": 2}, value]
    assert read(written(tmp_path / "a.json", json.dumps(records))) == records


def test_long_values_are_shortened_in_messages():
    name = sample_name({"id": "x" * 5000}, "a.json[3]")
    assert len(name) < 200 and "... (5002 characters) of a.json[3]" in name
    assert sample_name({"id": "short"}, "a") == "sample 'short' of a"
    with pytest.raises(InvalidRecordError, match=r"\.\.\. \(\d+ characters\)$") as caught:
        image_files({"image": ["a.png", 3] * 2000}, "sample")
    assert len(str(caught.value)) < 250
