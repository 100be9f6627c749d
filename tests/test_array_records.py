"""ArrayRecord: how a record is framed, and shards as a source of records and images."""

import concurrent.futures
import dataclasses
import json
import pickle

import pytest
from data_helpers import SIDE, assert_same, make_config, record, take, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from bluelm_jax.data import array_records, images
from bluelm_jax.data.array_records import ArrayRecords, DamagedShardError, decode, encode
from bluelm_jax.data.image_bytes import ImageBytes, image_name
from bluelm_jax.data.opening import open_all, open_records
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data.shard_writer import Job, ShardWriter
from bluelm_jax.data.sources import FileRecords, InvalidRecordError
from bluelm_jax.data.validation import validate
from bluelm_jax.data_config import SourceConfig

texts = st.text(max_size=20)
turns = st.lists(st.fixed_dictionaries({"from": texts, "value": texts}), max_size=3)


def write_file(path, encoded, options="group_size:1"):
    writer = array_records.array_record_module().ArrayRecordWriter(str(path), options)
    for data in encoded:
        writer.write(data)
    writer.close()
    return str(path)


@settings(derandomize=True, deadline=None)
@given(
    st.fixed_dictionaries({"id": texts, "conversations": turns}),
    st.lists(st.tuples(st.text(min_size=1, max_size=9), st.binary(max_size=40)), max_size=3),
)
def test_round_trip(sample, files):
    assert decode(encode(sample), "x") == sample
    sample = {**sample, "image": [name for name, _ in files]} if files else sample
    data = encode(sample, [data for _, data in files])
    assert decode(data, "x") == sample | (
        {"image": [ImageBytes(name, data, "x") for name, data in files]} if files else {}
    )


def test_frame_is_as_documented():
    data = encode({"id": "é", "image": "a.png"}, [b"PNG!"])
    text = '{"record":{"id":"é","image":"a.png"},"image_bytes":[4]}'.encode()
    assert data == b"llavarec" + b"\x01" + len(text).to_bytes(4, "little") + text + b"PNG!"
    assert encode({"id": "é"}) == '{"id":"é"}'.encode()
    half = {"id": "\ud800"}
    assert decode(encode(half), "x") == half
    with pytest.raises(ValueError, match="2 images for a record that names 1"):
        encode({"image": "a.png"}, [b"", b""])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "must be an object, got list"),
        (b"llavarec\x01", "cut off after 9 bytes"),
        (b"llavarec\x02\x00\x00\x00\x00", "version 2, this code reads 1"),
        (b"llavarec\x01\x02\x00\x00\x00{}", "not valid JSON: 'record'"),
        (encode({"image": ["a", "b"]}, [b"xx", b"yy"])[:-60], "not valid JSON|but images of"),
        (encode({"image": "a"}, [b"x" * 90])[:60], "60 bytes, but images of 90"),
    ],
)
def test_damaged_records_are_invalid(data, message):
    with pytest.raises(InvalidRecordError, match=f"^here: .*({message})"):
        decode(data, "here")


@pytest.mark.parametrize("group", [1, 16])
def test_random_access_over_files_and_threads(tmp_path, group):
    rows = [{"id": i, "text": "x" * (i % 50)} for i in range(100)]
    files = [
        write_file(tmp_path / f"{k}.array_record", map(encode, rows[k::3]), f"group_size:{group}")
        for k in range(3)
    ]
    expected = [row for k in range(3) for row in rows[k::3]]
    records = ArrayRecords(files)
    assert len(records) == 100 and records.where(34) == f"{files[1]}[0]"
    again = pickle.loads(pickle.dumps(records))
    assert len(pickle.dumps(records)) < 1000
    places = [(7 * i) % 100 for i in range(400)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(again.__getitem__, places)) == [expected[i] for i in places]
    with pytest.raises(IndexError, match="record 100 of 100"):
        records[100]


def test_files_patterns_and_mistakes(tmp_path):
    for k in range(2):
        write_file(tmp_path / f"a-{k}.array_record", [encode({"id": k})])
    names = open_all(SourceConfig(path=str(tmp_path / "a-*.array_record")))
    assert [names[i]["id"] for i in range(2)] == [0, 1]
    one = open_all(SourceConfig(path=str(tmp_path / "a-1.array_record")))
    assert [one[0]["id"], len(one)] == [1, 1]
    for path, message in (
        ("b-*.array_record", "no file has such a name"),
        ("none.array_record", "no such file"),
        ("", r"manifest\.json: no such file; prepare_data writes it last"),
    ):
        with pytest.raises(ValueError, match=message):
            open_all(SourceConfig(path=str(tmp_path / path)))
    (tmp_path / "bad.array_record").write_bytes(b"text" * 30000)
    with pytest.raises(ValueError, match=r"bad\.array_record: not an ArrayRecord file"):
        open_all(SourceConfig(path=str(tmp_path / "bad.array_record")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: a folder without manifest"):
        open_all(SourceConfig(path=str(tmp_path / "empty")))


def test_damage_within_a_file_names_the_shard_and_its_records(tmp_path):
    rows = [encode({"id": i, "text": f"<{i}>" * 500}) for i in range(300)]
    path = tmp_path / "a.array_record"
    write_file(path, rows, "group_size:1,uncompressed")
    data = bytearray(path.read_bytes())
    at = data.index(b"<77>" * 200)
    data[at : at + 9] = b"XXXXXXXXX"
    path.write_bytes(data)
    records = ArrayRecords([str(path)])
    assert records[76]["id"] == 76
    with pytest.raises(DamagedShardError, match=r"^damaged shard .*a\.array_record, record 77: "):
        records[77]
    assert records[78]["id"] == 78


def test_no_policy_leaves_a_damaged_shard_out_and_validation_counts_its_records(tmp_path):
    samples = [record(f"s{i}", f"Q{i}" * 40, "A") for i in range(40)]
    path = tmp_path / "a.array_record"
    write_file(path, map(encode, samples), "group_size:16,uncompressed")
    data = bytearray(path.read_bytes())
    data[data.index(b'"s20"') + 2] ^= 0x10
    path.write_bytes(data)
    config = make_config((SourceConfig(path=str(path)),), on_invalid_record="skip", seq_len=400)
    pipeline = Pipeline(config, side=SIDE)
    with pytest.raises(DamagedShardError, match=r"a\.array_record, records 16 to 31: cannot be"):
        pipeline.maker.of_record(pipeline.maker.make, pipeline.records[0], 20, config.sources[0])
    report = validate(config, side=SIDE)
    assert report.sources[0].kinds["unreadable_source"] == 16
    assert report.sources[0].counters["samples"] == 24


def write_shards(folder, path, shards, embed):
    job = Job(source=SourceConfig(path=str(path)), out=str(folder), name="t", shards=shards,
              embed_images=embed)  # fmt: skip
    writer = ShardWriter(job, FileRecords(path))
    folder.mkdir()
    return [writer.write(k, lambda: None, lambda: False) for k in range(shards)]


def test_batches_from_shards_equal_those_from_json(tmp_path):
    (tmp_path / "data").mkdir()
    path = write_dataset(tmp_path / "data", count=10, text_only=(2, 7))
    expected = take(iter(Pipeline(make_config(path), side=SIDE)), 6)
    for embed in (False, True):
        folder = tmp_path / f"shards{embed}"
        write_shards(folder, path, 3, embed)
        source = SourceConfig(
            path=str(folder / "*.array_record"),
            image_root="" if embed else str(path.parent),
        )
        for workers in (0, 2) if embed else (0,):
            config = make_config((source,), num_workers=workers)
            batches = iter(Pipeline(config, side=SIDE))
            assert_same(take(batches, 6), expected)
            batches.close()


def test_embedded_images_are_named_in_messages(tmp_path):
    sample = record("s", "<image>\nQ", "A", image="folder/a.png")
    file = write_file(tmp_path / "a.array_record", [encode(sample, [b"no image"])])
    source = SourceConfig(path=file)
    pipeline = Pipeline(make_config((source,)), side=SIDE)
    with pytest.raises(ValueError, match=r"sample 's' of .*\[0\]: folder/a\.png: not an image"):
        pipeline.maker.make(pipeline.records[0][0], source, pipeline.records[0].where(0))
    with pytest.raises(images.ImageError, match=r"a\.png: empty file"):
        images.read_image(ImageBytes("a.png", b""))
    assert image_name(ImageBytes("a.png", b"", "x[1]")) == "x[1]: a.png"
    assert b"secret" not in repr(ImageBytes("a", b"secret")).encode()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "not a manifest of"),
        (
            json.dumps({"format": array_records.FORMAT, "version": 9}),
            "version 9, this code reads 1",
        ),
        (
            json.dumps({"format": array_records.FORMAT, "version": 1, "shards": ["a"]}),
            "does not say which shards there are",
        ),
    ],
)
def test_manifests_are_checked(tmp_path, text, message):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match=rf"manifest\.json: {message}"):
        open_all(SourceConfig(path=str(tmp_path)))


def test_first_and_random_records(tmp_path):
    path = write_dataset(tmp_path, count=50, text_only=range(50))
    source = SourceConfig(path=str(path))

    def ids(seed=0, **fields):
        records = open_records(dataclasses.replace(source, **fields), seed)
        return [records[i]["id"] for i in range(len(records))]

    assert ids(first=4) == ["s0", "s1", "s2", "s3"]
    drawn = ids(random=20)
    assert len(set(drawn)) == 20 and drawn != ids(first=20)
    assert ids(random=8) == drawn[:8] and ids(seed=1, random=20) != drawn
    records = open_records(dataclasses.replace(source, random=5), 0)
    assert pickle.loads(pickle.dumps(records))[4]["id"] == drawn[4]
    assert f"[{drawn[3][1:]}] (byte" in records.where(3)
    with pytest.raises(IndexError, match="record 5 of 5"):
        records[5]
    for field in ("first", "random"):
        with pytest.raises(ValueError, match=rf"train\.json: {field} = 51, but there are 50"):
            ids(**{field: 51})
