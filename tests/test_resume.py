"""A run that is killed for real, with everything on, ends as if it had not been."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import time

import pytest
from data_helpers import write_dataset

CHILD = pathlib.Path(__file__).parent / "resume_child.py"


@dataclasses.dataclass
class Job:
    """A training process."""

    workdir: pathlib.Path
    log: pathlib.Path
    process: subprocess.Popen

    def lines(self):
        for line in self.process.stdout:
            yield line.split()

    def batches(self):
        return self.log.read_text().split()


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    sources = [
        write_dataset(folder, count=9, text_only=(2, 5), name="a.json"),
        write_dataset(folder, count=5, name="b.json", seed=1),
    ]
    cache = str(tmp_path_factory.mktemp("xla"))
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONPATH": os.pathsep.join([str(CHILD.parent), str(CHILD.parent.parent)]),
    }
    jobs = []

    def run(workdir, workers, log):
        command = [sys.executable, str(CHILD), workdir, *sources, workers, workdir.parent / log]
        process = subprocess.Popen(
            [str(part) for part in command], stdout=subprocess.PIPE, text=True, env=environment
        )
        jobs.append(process)
        return Job(workdir, workdir.parent / log, process)

    yield run
    for process in jobs:
        process.kill()
        process.wait()
        process.stdout.close()


def alive(pid):
    """Whether a process runs; one that ended and that nobody has waited for does not."""
    try:
        os.kill(pid, 0)
        stat = pathlib.Path(f"/proc/{pid}/stat")
        return not (stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "Z")
    except (ProcessLookupError, FileNotFoundError):
        return False


def test_killed_and_resumed_is_byte_identical(start, tmp_path):
    whole = start(tmp_path / "whole", 2, "whole.log")
    expected = [line for line in whole.lines() if line[0] == "final"]
    assert whole.process.wait() == 0 and expected[0][1] == "8"

    killed = start(tmp_path / "run", 2, "killed.log")
    workers = []
    for word, step, *workers in killed.lines():  # noqa: B007
        assert word == "step"
        if step == "5":
            killed.process.kill()
            break
    assert killed.process.wait() < 0 and len(workers) == 2
    assert killed.batches() == whole.batches()[: len(killed.batches())]
    until = time.monotonic() + 30
    while any(alive(int(pid)) for pid in workers) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(alive(int(pid)) for pid in workers), "workers outlive a killed run"

    resumed = start(tmp_path / "run", 1, "resumed.log")
    final = [line for line in resumed.lines() if line[0] == "final"]
    assert resumed.process.wait() == 0
    done = 8 - int(final[0][1])
    assert done == 4, "step 4 is the last one that was saved"
    assert resumed.batches() == whole.batches()[done:]
    assert final[0][2:] == expected[0][2:], "final state or counters differ"
    logs = [(job.workdir / "metrics.jsonl").read_bytes() for job in (whole, resumed)]
    assert logs[0] == logs[1] and logs[0].count(b"\n") == 8
