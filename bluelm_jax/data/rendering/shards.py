"""Many samples by several processes, the same bytes however many, and after any interruption.

Sample i is a function of (seed, kind, i). Processes draw shards of neighbouring samples; a shard's
records are written when all of its images are, so a shard either counts or is drawn again. So is one
whose images have since become others in number or in bytes.

    OUT/<kind>.json                 the records, image paths relative to OUT
    OUT/<kind>/000012/0001234.png   the images, 100 a folder
    OUT/<kind>/manifest.json        settings, counts, versions, fonts, what was left out
    OUT/<kind>/parts/               while unfinished: settings and the finished shards
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import multiprocessing
import os
import pathlib
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bluelm_jax import files
from bluelm_jax.data import worker_process
from bluelm_jax.data.rendering import manifest
from bluelm_jax.data.rendering.sampling import Drop, Drops, Task

SHARD = 100
KINDS = ("text", "formulas", "markdown", "pdf")


def sample_rng(seed: int, kind: str, index: int) -> np.random.Generator:
    """Random numbers of one sample; no two (seed, kind, index) share a stream."""
    # Stream 2 and up: the reading pages are [seed, 0 or 1, split, index].
    return np.random.default_rng([seed, 2 + KINDS.index(kind), index])


def render(
    task: Task,
    out_dir: str | pathlib.Path,
    *,
    seed: int,
    count: int,
    workers: int = 1,
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:
    """Draws the samples that are not there yet, and writes records and manifest.

    Args:
      task: what is drawn.
      out_dir: see the module's docstring.
      seed: of every sample.
      count: samples; those that cannot be drawn are left out and counted.
      workers: processes; 1 draws in this one.
      progress: called with the number of samples done.

    Returns:
      The manifest.

    Raises:
      ValueError: if the folder holds samples of other settings, or no sample can be drawn.
      KeyboardInterrupt: on Ctrl-C, after the shards in hand; the same call goes on from there.
    """
    folder = pathlib.Path(out_dir) / task.kind
    settings = json.loads(json.dumps({"seed": seed, "count": count, **task.settings()}))
    stored = _finished(folder, settings)
    if stored is not None:
        _mend(task, folder, stored, workers, progress)
        return stored
    (folder / "parts").mkdir(parents=True, exist_ok=True)
    begun = {"settings": settings, "software": manifest.software(task.kind)}
    files.write_text(folder / "parts" / "settings.json", json.dumps(begun, indent=1) + "\n")
    (folder / "manifest.json").unlink(missing_ok=True)  # Whose records are lost or damaged.
    whole = {start: _read_part(folder, start) for start in range(0, count, SHARD)}
    _draw(task, folder, settings, [s for s in whole if whole[s] is None], workers, progress)
    return _join(task, folder, settings)


def _draw(
    task: Task,
    folder: pathlib.Path,
    settings: dict[str, Any],
    starts: list[int],
    workers: int,
    progress: Callable[[int], None],
) -> None:
    """Draws shards, with progress: samples done of all."""
    seed, count = settings["seed"], settings["count"]
    done = count - sum(min(SHARD, count - start) for start in starts)
    progress(done)
    for start in _drawn(task, folder, seed, count, starts, workers):
        done += min(SHARD, count - start)
        progress(done)


def _mend(
    task: Task,
    folder: pathlib.Path,
    stored: dict[str, Any],
    workers: int,
    progress: Callable[[int], None],
) -> None:
    """Draws again the shards of a finished rendering that are not as its manifest has them."""
    settings, noted = stored["settings"], stored["shards"]
    starts = range(0, settings["count"], SHARD)
    damaged = [s for s in starts if noted[s // SHARD] != _size(_images(folder, s))]
    now = manifest.software(folder.name)
    if damaged and stored["software"] != now:
        images = _images(folder, damaged[0])
        raise ValueError(
            f"{images}: images are missing or damaged, and other software than that of "
            f"{folder / 'manifest.json'} would draw others: choose another --out"
        )
    (folder / "parts").mkdir(exist_ok=True)
    _draw(task, folder, settings, damaged, workers, progress)
    shutil.rmtree(folder / "parts")


def _part(folder: pathlib.Path, start: int) -> pathlib.Path:
    return folder / "parts" / f"{start // SHARD:06d}.json"


def _images(folder: pathlib.Path, start: int) -> pathlib.Path:
    return folder / f"{start // SHARD:06d}"


def _size(images: pathlib.Path) -> list[int]:
    """How many images a folder holds, and bytes in all."""
    if not images.is_dir():
        return [-1, 0]
    sizes = [path.stat().st_size for path in images.iterdir() if path.stem.isdigit()]
    return [len(sizes), sum(sizes)]


def _read_part(folder: pathlib.Path, start: int) -> dict[str, Any] | None:
    """A finished shard; None where there is none, or its images are not as they were written."""
    try:
        part = json.loads(_part(folder, start).read_text(encoding="utf-8"))
        return part if part["size"] == _size(_images(folder, start)) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _finished(folder: pathlib.Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """The manifest of a finished rendering; None where there is none or only a part of it."""
    complete, partial = folder / "manifest.json", folder / "parts" / "settings.json"
    found = complete if complete.is_file() else partial
    if not found.is_file():
        if folder.is_dir() and any(folder.iterdir()):
            raise ValueError(f"{folder} holds files of another origin: choose another --out")
        return None
    try:
        stored = json.loads(found.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{found}: {error}; remove the folder or choose another --out") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("settings"), dict):
        raise ValueError(f"{found}: no settings; remove the folder or choose another --out")
    before, now = stored["settings"], settings
    if found == partial:  # its other half has to come from the same software
        before, now = before | stored.get("software", {}), now | manifest.software(folder.name)
    changed = [
        f"{name} {before.get(name)!r} -> {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    if changed:
        raise ValueError(
            f"{folder} holds samples of other settings: {'; '.join(changed)}. "
            "Choose another --out or remove it"
        )
    if found != complete:
        return None
    shutil.rmtree(folder / "parts", ignore_errors=True)
    records = folder.with_name(f"{folder.name}.json")
    as_written = records.is_file() and records.stat().st_size == stored.get("json_bytes")
    return stored if as_written else None  # Then all is drawn again.


def _drawn(
    task: Task, folder: pathlib.Path, seed: int, count: int, starts: list[int], workers: int
) -> Iterator[int]:
    """Draws shards and yields the start of each, in whatever order they are finished."""
    if workers <= 1:
        for start in starts:
            draw_shard(task, folder, seed, start, min(count, start + SHARD))
            yield start
        return
    # A fresh interpreter a worker: forking a process that has threads may hang.
    pool = concurrent.futures.ProcessPoolExecutor(
        min(workers, max(1, len(starts))),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(task,),
    )
    try:
        with _no_interrupt():  # workers start here, and inherit it
            jobs = {
                pool.submit(_work, folder, seed, start, min(count, start + SHARD)): start
                for start in starts
            }
        for job in concurrent.futures.as_completed(jobs):
            job.result()
            yield jobs[job]
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


_worker_task: Task | None = None


def _start_worker(task: Task) -> None:
    global _worker_task
    worker_process.follow_parent()  # which stops the workers
    _worker_task = task


def _work(folder: pathlib.Path, seed: int, start: int, stop: int) -> None:
    assert _worker_task is not None
    draw_shard(_worker_task, folder, seed, start, stop)


def draw_shard(task: Task, folder: pathlib.Path, seed: int, start: int, stop: int) -> None:
    """Writes the images of samples start..stop-1, then their records."""
    images, part = _images(folder, start), _part(folder, start)
    # Its own for each process: one that was given up may still be about to end.
    drawn = part.with_name(f"{images.name}.{os.getpid()}.partial")
    shutil.rmtree(drawn, ignore_errors=True)
    drawn.mkdir()
    records, drops = [], Drops()
    for index in range(start, stop):
        try:
            sample = task.sample(sample_rng(seed, task.kind, index), index)
        except (OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # One strange input must not end a long rendering; the name leads to it.
            sample = Drop(f"{type(error).__name__} while drawing", f"sample {index}: {error}"[:200])
        if isinstance(sample, Drop):
            drops.add(sample.reason, sample.name)
            continue
        path = drawn / f"{index:07d}{sample.suffix}"
        path.write_bytes(sample.image)
        name = (images / path.name).relative_to(folder.parent).as_posix()
        records.append(sample.record(f"{task.kind}-{index:07d}", name))
    noted = {"records": records, "left_out": drops.to_plain(), "size": _size(drawn)}
    (written := drawn / part.name).write_text(
        json.dumps(noted, ensure_ascii=False), encoding="utf-8"
    )
    written = written.replace(part.with_name(f"{drawn.name}.json"))
    shutil.rmtree(images, ignore_errors=True)
    drawn.rename(images)
    written.replace(part)


def _join(task: Task, folder: pathlib.Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Writes the records of all shards in order, then the manifest, then removes the shards."""
    tally = manifest.Tally(task.prepared())
    path = folder.parent / f"{task.kind}.json"
    partial, sizes = path.with_name(path.name + ".partial"), []
    with partial.open("w", encoding="utf-8", newline="\n") as stream:
        before = "[\n"
        for start in range(0, settings["count"], SHARD):
            part = json.loads(_part(folder, start).read_text(encoding="utf-8"))
            tally.merge(part["left_out"])
            sizes.append(part["size"])
            for record in part["records"]:
                tally.add(record)
                stream.write(before + json.dumps(record, ensure_ascii=False))
                before = ",\n"
        stream.write("[]\n" if before == "[\n" else "\n]\n")
    if tally.written == 0:
        partial.unlink()
        raise ValueError(f"{path}: none of {settings['count']} samples can be drawn: {tally.why()}")
    noted = {"json_bytes": partial.stat().st_size, "shards": sizes}
    os.replace(partial, path)
    result = tally.manifest(task.kind, settings, task.licences()) | noted
    files.write_text(
        folder / "manifest.json", json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    )
    shutil.rmtree(folder / "parts", ignore_errors=True)
    return result
