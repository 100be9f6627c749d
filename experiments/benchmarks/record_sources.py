"""Sources of the same records side by side: time to open, records a second at random, memory, size.

    python -m experiments.benchmarks.record_sources --records=100000

Text records of a few turns, written as a JSON array, JSON lines, ArrayRecord shards and, where
`datasets` is installed, a Hugging Face data set. `json.load` of the array stands beside them. Each
source is opened and read in a fresh process; memory is what that process gains by it, the page cache
left out, and bytes pickled what a worker process is sent.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pathlib
import pickle
import random
import tempfile
import time

from absl import app, flags

from bluelm_jax.data.opening import open_all
from bluelm_jax.data.shard_writer import Job, ShardWriter
from bluelm_jax.data_config import SourceConfig

RECORDS = flags.DEFINE_integer("records", 100_000, "Records of each source.", lower_bound=1000)
_READS = 20_000


def make_records(count: int) -> list[dict]:
    """Text-only records of one to four rounds."""
    rng = random.Random(0)
    records = []
    for i in range(count):
        turns = []
        for _ in range(rng.randint(1, 4)):
            question = 'What does the "sign" say? ' * rng.randint(1, 3)
            answer = "It says that the shop is closed today. " * rng.randint(1, 12)
            turns += [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        records.append({"id": f"{i:09d}", "conversations": turns})
    return records


def write(folder: pathlib.Path, records: list[dict]) -> dict[str, str]:
    """Paths of the sources by name."""
    paths = {name: str(folder / name) for name in ("train.json", "train.jsonl", "hf")}
    pathlib.Path(paths["train.json"]).write_text(json.dumps(records))
    pathlib.Path(paths["train.jsonl"]).write_text("\n".join(map(json.dumps, records)))
    (folder / "shards").mkdir()
    source = SourceConfig(path=paths["train.json"])
    job = Job(source=source, out=str(folder / "shards"), name="a", shards=4)
    writer = ShardWriter(job, open_all(source))
    for shard in range(job.shards):
        writer.write(shard, lambda: None, lambda: False)
    paths["shards"] = str(folder / "shards" / "*.array_record")
    try:
        import datasets
    except ImportError:
        del paths["hf"]
    else:
        datasets.disable_progress_bars()
        datasets.Dataset.from_list(records).save_to_disk(paths["hf"])
    return paths


def _private_memory() -> float:
    """MiB of this process that no file backs."""
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return float("nan")


def measure(path: str, whole: bool) -> tuple[float, float, float, int]:
    """Seconds to open, records a second, MiB gained, bytes pickled."""
    if path.endswith("hf"):
        import datasets  # noqa: F401 (its own memory and time are not the source's)
    before, start = _private_memory(), time.perf_counter()
    source = (
        json.loads(pathlib.Path(path).read_text()) if whole else open_all(SourceConfig(path=path))
    )
    opened = time.perf_counter() - start
    order = random.Random(1)
    start = time.perf_counter()
    for _ in range(_READS):
        source[order.randrange(len(source))]
    rate = _READS / (time.perf_counter() - start)
    return opened, rate, _private_memory() - before, len(pickle.dumps(source))


def main(argv: list[str]) -> None:
    """Prints the table."""
    del argv
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        paths = write(folder, make_records(RECORDS.value))
        sizes = {
            name: sum(f.stat().st_size for f in folder.rglob("*") if f.match(pattern))
            for name, pattern in (
                ("train.json", "train.json"), ("train.jsonl", "train.jsonl"),
                ("shards", "shards/*.array_record"), ("hf", "hf/*"),
            )
        }  # fmt: skip
        print(f"{RECORDS.value:,} records, {os.cpu_count()} cores, {_READS:,} reads at random")
        print(
            f"{'source':<12} {'MiB':>7} {'open s':>8} {'reads/s':>10} {'MiB used':>9} {'pickled':>12}"
        )
        cases = [
            ("json.load", paths["train.json"], True),
            *((n, p, False) for n, p in paths.items()),
        ]
        for label, path, whole in cases:
            with context.Pool(1) as pool:
                opened, rate, memory, pickled = pool.apply(measure, (path, whole))
            size = sizes["train.json" if whole else label] / 2**20
            print(
                f"{label:<12} {size:>7.1f} {opened:>8.2f} {rate:>10,.0f} {memory:>9.1f} {pickled:>12,}",
                flush=True,
            )


if __name__ == "__main__":
    app.run(main)
