"""Hugging Face data sets on disk: both forms of turns, every form of image, batches and workers."""

import builtins
import datetime
import pickle

import pytest
from data_helpers import SIDE, assert_same, make_config, record, take, turn, write_image

from bluelm_jax.data.hf_datasets import DatasetRecords
from bluelm_jax.data.image_bytes import ImageBytes
from bluelm_jax.data.opening import open_all, open_records
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import SourceConfig

datasets = pytest.importorskip("datasets", reason="requirements-data.txt is not installed")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def rows(folder, count=6):
    """Records with one image each; every third has none."""
    samples = []
    for i in range(count):
        sample = record(f"s{i}", "<image>\nQ" if i % 3 else "Q", "A" * (i + 1))
        image = write_image(folder, f"{i}.png", 30 + 7 * i, 40, seed=i) if i % 3 else None
        samples.append(sample | {"image": image})
    return samples


def saved(folder, samples, features=None):
    table = datasets.Dataset.from_list(samples, features=features)
    table.save_to_disk(str(folder))
    return SourceConfig(path=str(folder))


def in_memory(samples):
    """Rows as Arrow gives them, without its own storage."""

    class InMemory(DatasetRecords):
        def __init__(self):
            self._names = ("memory",)

        def _row(self, index):
            return samples[index]

    return InMemory()


def read(source):
    records = open_all(source)
    return [records[i] for i in range(len(records))]


def without_none(sample):
    return {key: value for key, value in sample.items() if value is not None}


def test_list_of_turns_and_paths(tmp_path):
    samples = rows(tmp_path)
    source = saved(tmp_path / "hf", samples)
    assert read(source) == [without_none(sample) for sample in samples]
    records = open_all(source)
    assert records.where(3) == f"{tmp_path / 'hf'}[3]" and len(pickle.dumps(records)) < 300
    assert pickle.loads(pickle.dumps(records))[5] == samples[5]


def test_dict_of_lists_becomes_turns():
    columns = {"from": ["human", "gpt"], "value": ["Q", "A"]}
    rows = [{"id": "a", "conversations": columns}, {"id": "b", "conversations": {"from": "x"}}]
    records = in_memory(rows)
    assert records[0]["conversations"] == [turn("human", "Q"), turn("gpt", "A")]
    assert records[1]["conversations"] == {"from": "x"}
    rows[0]["conversations"] = {"from": ["human", "gpt"], "value": ["Q"]}
    assert records[0]["conversations"] == rows[0]["conversations"]


@pytest.mark.parametrize("column", ["image", "images"])
def test_image_feature_stays_undecoded(tmp_path, column):
    name = write_image(tmp_path, "a.png")
    data = (tmp_path / name).read_bytes()
    turns = [turn("human", "<image><image>Q"), turn("gpt", "A")]
    several = [{"bytes": data, "path": "x.png"}, {"bytes": data, "path": None}]
    feature = datasets.Image()
    table = datasets.Dataset.from_list([{"conversations": turns, column: several}])
    table = table.cast_column(column, datasets.List(feature))
    table.save_to_disk(str(tmp_path / "hf"))
    (sample,) = read(SourceConfig(path=str(tmp_path / "hf")))
    where = f"{tmp_path / 'hf'}[0]"
    assert sample["image"] == [
        ImageBytes("x.png", data, where),
        ImageBytes("image 1", data, where),
    ]
    single = datasets.Dataset.from_list([{"image": {"bytes": data, "path": None}}])
    single.cast_column("image", feature).save_to_disk(str(tmp_path / "one"))
    (sample,) = read(SourceConfig(path=str(tmp_path / "one")))
    assert sample == {"image": ImageBytes("image 0", data, f"{tmp_path / 'one'}[0]")}
    paths = in_memory([{"image": {"bytes": None, "path": name}}])
    assert paths[0] == {"image": name}


def test_other_columns_are_not_read_and_nothing_is_written(tmp_path):
    """Neither a damaged image elsewhere nor a time matters; large lists stay undecoded, too."""
    data = (tmp_path / write_image(tmp_path, "a.png")).read_bytes()
    string, image = datasets.Value("string"), datasets.Image()
    turns = [turn("human", "<image>Q"), turn("gpt", "A")]
    features = datasets.Features(
        id=string,
        conversations=datasets.List({"from": string, "value": string}),
        images=datasets.LargeList(image),
        thumb=image,
        when=datasets.Value("timestamp[s]"),
    )
    good, bad = ({"bytes": content, "path": None} for content in (data, b"junk"))
    sample = {"id": "a", "conversations": turns, "images": [good], "thumb": bad}
    when = datetime.datetime(2024, 1, 1)
    source = saved(tmp_path / "hf", [sample | {"when": when}], features)
    before = sorted((tmp_path / "hf").iterdir())
    image_bytes = ImageBytes("image 0", data, f"{tmp_path / 'hf'}[0]")
    assert read(source) == [{"id": "a", "conversations": turns, "image": [image_bytes]}]
    assert sorted((tmp_path / "hf").iterdir()) == before
    with pytest.raises(ValueError, match="other: columns when; needs 'conversations'"):
        open_all(saved(tmp_path / "other", [{"when": when}]))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_folder_of_tables(tmp_path, kind):
    samples = [without_none(sample) for sample in rows(tmp_path)]
    (tmp_path / "tables").mkdir()
    for k in range(2):
        part = datasets.Dataset.from_list(rows(tmp_path)[3 * k : 3 * k + 3])
        path = str(tmp_path / "tables" / f"{k}.{kind}")
        if kind == "parquet":
            part.to_parquet(path)
        else:
            part.save_to_disk(str(tmp_path / f"saved{k}"))
            (file,) = (tmp_path / f"saved{k}").glob("*.arrow")
            file.rename(path)
    assert read(SourceConfig(path=str(tmp_path / "tables"))) == samples
    assert read(SourceConfig(path=str(tmp_path / "tables" / f"*.{kind}"))) == samples
    assert read(SourceConfig(path=str(tmp_path / "tables" / f"1.{kind}"))) == samples[3:]


def test_batches_equal_those_from_json_with_workers_too(tmp_path):
    import json

    samples = rows(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps([without_none(s) for s in samples]))
    expected = take(iter(Pipeline(make_config(tmp_path / "a.json"), side=SIDE)), 4)
    source = saved(tmp_path / "hf", samples)
    for workers in (0, 2):
        batches = iter(Pipeline(make_config((source,), num_workers=workers), side=SIDE))
        assert_same(take(batches, 4), expected)
        batches.close()
    assert [open_records(SourceConfig(path=source.path, first=2))[1]["id"]] == ["s1"]


def test_mistakes_are_named(tmp_path, monkeypatch):
    table = datasets.Dataset.from_list([{"id": 1}])
    datasets.DatasetDict(train=table, test=table).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ValueError, match=r"both: holds several splits; name one of .*both/train"):
        open_all(SourceConfig(path=str(tmp_path / "both")))
    assert read(SourceConfig(path=str(tmp_path / "both" / "train"))) == [{"id": 1}]
    (tmp_path / "bad.parquet").write_bytes(b"no table")
    with pytest.raises(ValueError, match=r"bad\.parquet: cannot be read"):
        open_all(SourceConfig(path=str(tmp_path / "bad.parquet")))
    with pytest.raises(ValueError, match=r"none\.parquet: no such file"):
        open_all(SourceConfig(path=str(tmp_path / "none.parquet")))
    plain_import = builtins.__import__

    def without_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ImportError("No module named 'datasets'")
        return plain_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(ValueError, match=r"need `pip install -r requirements-data\.txt`"):
        open_all(SourceConfig(path=str(tmp_path / "both" / "train")))
