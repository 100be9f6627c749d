"""prepare_data: patterns, names and folders it refuses, images of odd names, a killed main process."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from data_helpers import record, write_json

from bluelm_jax.data import shard_writer
from bluelm_jax.data.opening import open_all
from bluelm_jax.data_config import SourceConfig
from experiments import prepare_data

ROOT = pathlib.Path(__file__).parent.parent


def start(path, out, *options):
    line = [sys.executable, "-m", "experiments.prepare_data", f"--in={path}", f"--out={out}"]
    return subprocess.Popen(
        [*line, *options],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(path, out, *options):
    process = start(path, out, *options)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


def write_shards(folder, tag):
    """Two ArrayRecord files in `folder`."""
    folder.mkdir(exist_ok=True)
    samples = [record(f"{tag}{i}", "Q", "A") for i in range(8)]
    path = write_json(folder.parent / f"{tag}.json", samples)
    job = shard_writer.Job(
        source=SourceConfig(path=str(path)), out=str(folder), name="part", shards=2
    )
    writer = shard_writer.ShardWriter(job, open_all(job.source))
    for shard in range(2):
        writer.write(shard, lambda: None, lambda: False)


def test_a_pattern_is_hashed_and_a_change_behind_it_refused(tmp_path):
    write_shards(tmp_path / "in", "old")
    pattern, out = f"{tmp_path}/in/part-*", tmp_path / "out"
    assert run(pattern, out, "--shards=2", "--workers=1")[0] == 0
    found = json.loads((out / "manifest.json").read_text())
    assert [shard["file"] for shard in found["shards"]] == [
        f"part-0000{k}-of-00002.array_record" for k in range(2)
    ]
    files = sorted((tmp_path / "in").glob("part-*"))
    assert found["input"]["bytes"] == sum(file.stat().st_size for file in files) > 0
    write_shards(tmp_path / "in", "new")
    assert shard_writer.fingerprint(pattern)["sha256"] != found["input"]["sha256"]
    code, err = run(pattern, out, "--shards=2", "--workers=1")
    assert code == 2 and "made otherwise: input" in err and err.count("\n") == 1
    (tmp_path / "empty").mkdir()
    for nothing, message in (("empty", "no file to take"), ("empty/*", "no file has such a name")):
        with pytest.raises(ValueError, match=message):
            shard_writer.fingerprint(str(tmp_path / nothing))


@pytest.mark.parametrize("name", ["../evil", "a/b", "a\\b", "/a", "..", ".hidden", "part-*", "a\0"])
def test_names_that_are_no_file_names_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"^--name=.*must be a plain file name"):
        prepare_data.check_names(str(tmp_path / "a.json"), tmp_path / "out", name)


@pytest.mark.parametrize("label", ["part-*", "train", "*", "a b", "[0-9]", "é"])
def test_labels_become_file_names(tmp_path, label):
    name = prepare_data.plain_name(label)
    prepare_data.check_names(str(tmp_path / "a.json"), tmp_path / "out", name)
    assert name == {"part-*": "part", "*": "records", "[0-9]": "0-9"}.get(label, label)


def test_out_within_in_is_refused(tmp_path):
    write_shards(tmp_path / "in", "a")
    for path, out in (("in", "in"), ("in", "in/deep/out"), ("in/*.array_record", "in")):
        with pytest.raises(ValueError, match=r"^--out=.*: lies in --in="):
            prepare_data.check_names(str(tmp_path / path), tmp_path / out, None)
    prepare_data.check_names(str(tmp_path / "in"), tmp_path / "in2", None)
    prepare_data.check_names(str(tmp_path / "in" / "*.array_record"), tmp_path / "in/out", None)


@pytest.mark.parametrize("name", ["manifest.json", ".progress/plan.json"])
@pytest.mark.parametrize("text", ["[]", "", "{"])
def test_damaged_plans_are_named(tmp_path, name, text):
    write_shards(tmp_path / "out", "a")  # Shards are there, so that the plan counts.
    path = tmp_path / "out" / name
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^{path}: damaged \(.*choose another$"):
        prepare_data.check_plan(tmp_path / "out", {"input": {"sha256": ""}})


def test_images_of_odd_names_do_not_end_the_estimate(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "large").write_bytes(b"x" * 2**22)
    odd = ["x" * 400, "a\0b", "/etc/passwd", "../large", "."]
    samples = [record(f"{i}", "<image>\nQ", "A", image=name) for i, name in enumerate(odd)]
    path = write_json(tmp_path / "data" / "a.json", [record("good", "Q", "A"), *samples])
    source = SourceConfig(path=str(path))
    assert shard_writer.shards_of(source, open_all(source), 1, embed_images=True) == 1
    options = ("--embed_images", "--on_unreadable_image=skip", "--workers=1")
    code, err = run(path, tmp_path / "out", *options)
    assert code == 0, err
    found = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert found["records"] == 1 and found["skipped"] == {"unreadable_image": 5}


def processes(session):
    """Ids of the live processes of a session."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # It ended meanwhile.
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_a_killed_command(tmp_path, sent):
    (tmp_path / "data").mkdir()
    samples = [record(f"{i}", "Q" * 400, "A" * 400) for i in range(20_000)]
    path, out = write_json(tmp_path / "data" / "a.json", samples), tmp_path / "out"
    process = start(path, out, "--shards=20", "--workers=2")
    try:
        deadline = time.monotonic() + 100
        while not list(out.glob("*.array_record")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        assert len(processes(process.pid)) >= 3
        process.send_signal(sent)
        process.wait(30)
        while processes(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes(process.pid) == []
    finally:
        process.communicate()
        for left in processes(process.pid):
            os.kill(left, signal.SIGKILL)
    assert run(path, out, "--shards=20", "--workers=2")[0] == 0
    assert len(open_all(SourceConfig(path=str(out)))) == 20_000
    assert len(os.listdir(out)) == 21
