"""prepare_data: the same bytes from any number of workers, restarts, policies, and how mistakes end."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from absl import flags
from data_helpers import SIDE, assert_same, make_config, record, take, write_dataset, write_json

from bluelm_jax.data import shard_writer
from bluelm_jax.data.opening import open_all
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import SourceConfig
from experiments import prepare_data

ROOT = pathlib.Path(__file__).parent.parent
BAD = [
    record("good", "Q", "A"),
    {"id": "no turns"},
    record("lost", "<image>\nQ", "A", image="lost.png"),
    record("two", "<image><image>\nQ", "A", image="lost.png"),
]


@pytest.fixture
def command():
    """The command in this process, its flags by name."""

    def run(path, out, **options):
        values = flags.FlagValues()
        before, prepare_data.FLAGS = prepare_data.FLAGS, values
        try:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(flags, "FLAGS", values)
                define(values)
                given = {"in": path, "out": out, "workers": 1} | options
                values(["prepare_data", *(f"--{k}={v}" for k, v in given.items())])
                prepare_data.main([])
        finally:
            prepare_data.FLAGS = before
        return json.loads((pathlib.Path(out) / "manifest.json").read_text())

    return run


def define(values):
    """The command's flags in a table of their own, so that tests do not meet each other's."""
    with pytest.MonkeyPatch.context() as patch:
        for kind in ("string", "integer", "float", "bool", "enum"):
            whole = getattr(flags, f"DEFINE_{kind}")

            def defined(*args, whole=whole, **kwargs):
                return whole(*args, flag_values=values, **kwargs)

            patch.setattr(flags, f"DEFINE_{kind}", defined)
        prepare_data.define_flags()


@pytest.fixture
def dataset(tmp_path):
    (tmp_path / "data").mkdir()
    return write_dataset(tmp_path / "data", count=23, text_only=(2, 9))


def contents(folder):
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


def start(path, out, *options):
    line = [sys.executable, "-m", "experiments.prepare_data", f"--in={path}", f"--out={out}"]
    return subprocess.Popen(
        [*line, *options], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_workers_change_nothing_and_batches_are_those_of_the_json(dataset, tmp_path, command):
    manifest = command(dataset, tmp_path / "one", shards=3, embed_images=True)
    process = start(dataset, tmp_path / "two", "--shards=3", "--embed_images", "--workers=2")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "23 of 23 records in 3 shards" in out and "100%" in err
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert sorted(contents(tmp_path / "one")) == [
        "manifest.json",
        *(f"train-0000{k}-of-00003.array_record" for k in range(3)),
    ]
    assert [shard["records"] for shard in manifest["shards"]] == [7, 8, 8]
    expected = take(iter(Pipeline(make_config(dataset), side=SIDE)), 8)
    source = SourceConfig(path=str(tmp_path / "one"))
    assert_same(take(iter(Pipeline(make_config((source,)), side=SIDE)), 8), expected)


def test_manifest_says_what_was_made_of_what(dataset, tmp_path, command):
    manifest = command(dataset, tmp_path / "out", shards=2, name="mine")
    assert manifest["input"] == {
        "path": str(dataset),
        "bytes": dataset.stat().st_size,
        "sha256": shard_writer.sha256(dataset),
    }
    assert (manifest["records"], manifest["input_records"], manifest["skipped"]) == (23, 23, {})
    for shard in manifest["shards"]:
        path = tmp_path / "out" / shard["file"]
        assert path.name.startswith("mine-0000")
        assert shard["bytes"] == path.stat().st_size
        assert shard["sha256"] == shard_writer.sha256(path)
    assert manifest["bytes"] == sum(shard["bytes"] for shard in manifest["shards"])
    source = SourceConfig(path=str(tmp_path / "out"), image_root=str(dataset.parent))
    assert [open_all(source)[i] for i in range(23)] == json.loads(dataset.read_text())


def test_json_lines_and_data_sets_give_the_same_shards(dataset, tmp_path, command):
    datasets = pytest.importorskip("datasets", reason="requirements-data.txt is not installed")
    datasets.disable_progress_bars()
    samples = json.loads(dataset.read_text())
    lines = dataset.parent / "train.jsonl"
    lines.write_text("\n".join(map(json.dumps, samples)))
    folder = dataset.parent / "train"
    datasets.Dataset.from_list(samples).save_to_disk(str(folder))
    made = [command(p, tmp_path / p.name, shards=2, embed_images=True) for p in (dataset, lines)]
    assert made[0]["shards"] == made[1]["shards"]
    command(folder, tmp_path / "hf", shards=2, embed_images=True)
    found = [open_all(SourceConfig(path=str(tmp_path / n))) for n in ("train.json", "hf")]
    for i in range(23):
        left, right = (records[i] for records in found)
        assert left["conversations"] == right["conversations"]
        images = ([x.data for x in each.get("image", ())] for each in (left, right))
        assert next(images) == next(images)


def test_shards_of_shards_are_the_same(dataset, tmp_path, command):
    command(dataset, tmp_path / "one", shards=3, embed_images=True)
    again = command(tmp_path / "one", tmp_path / "two", shards=3, embed_images=True, name="train")
    first = json.loads((tmp_path / "one" / "manifest.json").read_text())
    assert again["shards"] == first["shards"]
    with pytest.raises(ValueError, match=r"'s0' .*: holds the bytes of its images; embed"):
        command(tmp_path / "one", tmp_path / "three", shards=3)


def test_shards_of_about_a_size(tmp_path, command):
    (tmp_path / "data").mkdir()
    path = write_json(
        tmp_path / "data" / "a.json", [record(f"{i}", "Q", "A" * 5000) for i in range(400)]
    )
    assert len(command(path, tmp_path / "out", shard_mb=0.5)["shards"]) == 4
    assert len(command(path, tmp_path / "big")["shards"]) == 1


def test_policies(tmp_path, command):
    (tmp_path / "data").mkdir()
    path = write_json(tmp_path / "data" / "bad.json", BAD)
    with pytest.raises(
        ValueError, match=r"sample 'no turns' of .*bad\.json\[1\].*--on_invalid_record=skip"
    ):
        command(path, tmp_path / "raised", shards=1, on_unreadable_image="skip")
    flag = r".*\(--on_unreadable_image=skip leaves such samples out\)"
    with pytest.raises(ValueError, match=r"sample 'lost' of .*lost\.png: cannot be opened" + flag):
        command(path, tmp_path / "image", shards=1, embed_images=True, on_invalid_record="skip")
    skip = {"on_invalid_record": "skip", "on_unreadable_image": "skip"}
    manifest = command(path, tmp_path / "out", shards=2, embed_images=True, **skip)
    assert (manifest["records"], manifest["input_records"]) == (1, 4)
    assert manifest["skipped"] == {"invalid_record": 2, "unreadable_image": 1}
    first, second = manifest["shards"]
    assert [first["records"], second["records"]] == [1, 0]
    assert "no turns" in first["names"]["invalid_record"][0]
    assert "lost" in second["names"]["unreadable_image"][0]
    assert "2 <image> in the turns, 1 images" in second["names"]["invalid_record"][0]
    records = open_all(SourceConfig(path=str(tmp_path / "out")))
    assert len(records) == 1 and records[0] == BAD[0]
    (tmp_path / "image" / "bad-00000-of-00001.array_record.partial").touch()  # As a kill leaves.
    again = command(path, tmp_path / "image", shards=2, embed_images=True, **skip)
    assert contents(tmp_path / "image") == contents(tmp_path / "out") and again == manifest
    with pytest.raises(ValueError, match="'no turns'"):
        command(path, tmp_path / "half", shards=3, embed_images=True)
    assert len(list((tmp_path / "half").glob("*.array_record"))) == 1
    finished = command(path, tmp_path / "half", shards=3, embed_images=True, **skip)
    assert finished == command(path, tmp_path / "all", shards=3, embed_images=True, **skip)
    kept = command(path, tmp_path / "paths", shards=1, on_invalid_record="skip")
    assert kept["records"] == 2  # Without embedding nobody looks at the images.


def test_restart_keeps_whole_shards_and_mends_damaged_ones(dataset, tmp_path, command, monkeypatch):
    command(dataset, tmp_path / "whole", shards=4)
    expected = contents(tmp_path / "whole")
    out = tmp_path / "out"
    written = []
    whole = shard_writer.ShardWriter.write

    def interrupted(self, shard, *args):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(shard)
        return whole(self, shard, *args)

    monkeypatch.setattr(shard_writer.ShardWriter, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command(dataset, out, shards=4)
    assert written == [0, 1] and not (out / "manifest.json").exists()
    with pytest.raises(ValueError, match=r"manifest\.json: no such file"):
        open_all(SourceConfig(path=str(out)))

    def counted(self, shard, *args):
        written.append(shard)
        return whole(self, shard, *args)

    def damage(shard):
        data = bytearray((out / shard).read_bytes())
        data[len(data) // 2] ^= 1
        (out / shard).write_bytes(data)

    monkeypatch.setattr(shard_writer.ShardWriter, "write", counted)
    damage("train-00001-of-00004.array_record")
    command(dataset, out, shards=4)
    assert written == [0, 1, 1, 2, 3] and contents(out) == expected
    damage("train-00002-of-00004.array_record")
    (out / "train-00003-of-00004.array_record").unlink()
    command(dataset, out, shards=4)
    assert written[5:] == [2, 3] and contents(out) == expected
    command(dataset, out, shards=4)
    assert written[7:] == []


def test_interrupt_ends_workers_and_the_command_goes_on(tmp_path):
    (tmp_path / "data").mkdir()
    samples = [record(f"{i}", "Q" * 400, "A" * 400) for i in range(30_000)]
    path = write_json(tmp_path / "data" / "a.json", samples)
    out = tmp_path / "out"
    process = start(path, out, "--shards=40", "--workers=2")
    deadline = time.monotonic() + 120
    while len(list(out.glob("*.array_record"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "the same command continues" in err
    assert "Traceback" not in err
    kept = {p.name: p.stat().st_mtime_ns for p in out.glob("*.array_record")}
    assert 3 <= len(kept) < 40 and not list(out.glob("*.partial"))
    process = start(path, out, "--shards=40", "--workers=2")
    assert process.communicate(timeout=200)[0].startswith("30,000 of 30,000 records in 40 shards")
    assert all((out / name).stat().st_mtime_ns == at for name, at in kept.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shards": 3}, "num_shards 2 -> 3"),
        ({"embed_images": True}, "embed_images False -> True"),
        ({"on_invalid_record": "skip"}, "on_invalid_record 'raise' -> 'skip'"),
        ({"name": "x"}, "name 'train' -> 'x'"),
    ],
)
def test_a_folder_of_other_shards_is_refused(dataset, tmp_path, command, change, message):
    command(dataset, tmp_path / "out", shards=2)
    with pytest.raises(ValueError, match=rf"out: made otherwise: .*{message}.*another --out"):
        command(dataset, tmp_path / "out", **({"shards": 2} | change))


def test_changed_input_and_strange_folders_are_refused(dataset, tmp_path, command):
    command(dataset, tmp_path / "out", shards=2)
    dataset.write_text(dataset.read_text().replace("Read it.", "Read me."))
    with pytest.raises(ValueError, match=r"made otherwise: input \{'path'"):
        command(dataset, tmp_path / "out", shards=2)
    with pytest.raises(ValueError, match=r"data: not empty \(0-0\.png"):
        command(dataset, dataset.parent, shards=2)


def test_contradicting_flags_are_refused(dataset, tmp_path, command):
    with pytest.raises(ValueError, match=r"--shards=99, but .* has 23 records"):
        command(dataset, tmp_path / "out", shards=99)
    with pytest.raises(ValueError, match="give --shards or --shard_mb, not both"):
        command(dataset, tmp_path / "out", shards=2, shard_mb=3)
    with pytest.raises(ValueError, match=r"none\.json: no such file"):
        command(tmp_path / "none.json", tmp_path / "out", shards=2)
    with pytest.raises(ValueError, match="holds no record"):
        command(write_json(tmp_path / "a.json", []), tmp_path / "out", shards=2)


def test_mistakes_end_in_one_line(dataset, tmp_path):
    process = start(dataset, tmp_path / "out", "--shards=2", "stray")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 2
    assert err == "error: unexpected arguments ['stray']; options start with --\n"


def test_full_disk_is_named(dataset, tmp_path, command, monkeypatch):
    class Full:
        def __init__(self, *args):
            raise RuntimeError("No space left on device")

    monkeypatch.setattr(shard_writer.array_records.array_record_module(), "ArrayRecordWriter", Full)
    with pytest.raises(
        OSError, match=r"array_record\S*\.partial: cannot be written: No space left"
    ):
        command(dataset, tmp_path / "out", shards=1)
    assert os.listdir(tmp_path / "out") == [".progress"]
