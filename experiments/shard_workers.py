"""Shards written by several processes, with one progress bar; stopped within a record."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Callable, Collection
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import tqdm

from bluelm_jax.data import shard_writer, worker_process
from bluelm_jax.data.shard_writer import Job, ShardWriter, Stopped
from bluelm_jax.data.sources import Records

_POLL_SECONDS = 0.2
_REPORT_EVERY = 32  # Records between two reports of a worker.


def write_shards(job: Job, records: Records, workers: int) -> list[dict[str, Any]]:
    """Writes the shards that are not there yet.

    Args:
      job: what to write.
      records: all records of its source.
      workers: processes; 1 works in this one.

    Returns:
      The note of every shard, in order.

    Raises:
      ValueError, OSError: of the first shard that fails; shards that are whole stay.
    """
    writer = ShardWriter(job, records)
    with tqdm.tqdm(total=len(records), desc=job.name, unit=" records") as bar:
        if workers == 1:
            return [_write(job, writer, shard, bar.update, lambda: False) for shard in _all(job)]
        return _Pool(job, writer, workers).run(bar)


def _all(job: Job) -> range:
    return range(job.shards)


def _write(
    job: Job,
    writer: ShardWriter,
    shard: int,
    on_records: Callable[[int], Any],
    should_stop: Callable[[], bool],
) -> dict[str, Any]:
    """A finished shard's note; writes it if need be."""
    note = shard_writer.finished(job, shard)
    if note is not None:
        on_records(len(writer.span(shard)))
        return note
    return writer.write(shard, lambda: on_records(1), should_stop)


class _Pool:
    """One call of `write_shards` with worker processes."""

    def __init__(self, job: Job, writer: ShardWriter, workers: int):
        context = multiprocessing.get_context("spawn")
        self._job, self._done, self._stop = job, context.Value("q", 0), context.Event()
        self._executor = concurrent.futures.ProcessPoolExecutor(
            min(workers, job.shards),
            mp_context=context,
            initializer=_start_worker,
            initargs=(job, writer, self._done, self._stop),
        )

    def run(self, bar: tqdm.tqdm) -> list[dict[str, Any]]:
        """Writes every shard."""
        try:
            futures = [self._executor.submit(_write_in_worker, shard) for shard in _all(self._job)]
            waiting: Collection[concurrent.futures.Future] = futures
            while waiting:
                done, waiting = concurrent.futures.wait(
                    waiting, _POLL_SECONDS, concurrent.futures.FIRST_EXCEPTION
                )
                if self._done.value > bar.n:
                    bar.update(self._done.value - bar.n)
                for future in done:
                    future.result()
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise ValueError(
                "a worker process was killed (is there memory for so many?); the same command goes "
                "on with the shards that are left"
            ) from error
        finally:
            self._stop.set()
            self._executor.shutdown(cancel_futures=True)


_state: tuple[Job, ShardWriter, Any, Any] | None = None


def _start_worker(job: Job, writer: ShardWriter, done: Any, stop: Any) -> None:
    global _state
    worker_process.follow_parent()  # Which says when to stop.
    _state = (job, writer, done, stop)


def _write_in_worker(shard: int) -> dict[str, Any]:
    assert _state is not None
    job, writer, done, stop = _state
    waiting = 0

    def on_records(count: int) -> None:
        nonlocal waiting
        waiting += count
        if waiting >= _REPORT_EVERY:
            report()

    def report() -> None:
        nonlocal waiting
        with done.get_lock():
            done.value += waiting
        waiting = 0

    try:
        note = _write(job, writer, shard, on_records, stop.is_set)
    except Stopped:
        return {}  # Nobody looks at it any more.
    report()
    return note
