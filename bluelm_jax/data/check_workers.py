"""Records checked in this process or in several, in order."""

from __future__ import annotations

import collections
import concurrent.futures
import multiprocessing
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from typing import NamedTuple

from bluelm_jax.data import worker_process
from bluelm_jax.data.array_records import DamagedShardError
from bluelm_jax.data.findings import Finding
from bluelm_jax.data.sample_checks import STOPS, Checked, SampleChecker
from bluelm_jax.data.sources import Records
from bluelm_jax.data_config import SourceConfig

_AHEAD = 4  # Tasks under way for each worker.


class Task(NamedTuple):
    """Records [start, stop) of a source."""

    source: int
    start: int
    stop: int


class ChunkChecker:
    """Checks the records of a task; what a worker is given."""

    def __init__(
        self, checker: SampleChecker, records: Sequence[Records], sources: Sequence[SourceConfig]
    ):
        self._checker, self._records, self._sources = checker, records, sources

    def __call__(self, task: Task) -> list[Checked]:
        """What is known of each record."""
        return [self._checked(task.source, i) for i in range(task.start, task.stop)]

    def _checked(self, number: int, index: int) -> Checked:
        records, source = self._records[number], self._sources[number]
        try:
            return self._checker.check(records, index, source)
        except DamagedShardError as error:  # No policy leaves it out; the other records count.
            where = records.where(index)
            finding = Finding(
                "unreadable_source", source.path, index, where=where, detail=str(error)
            )
            return Checked([finding], [(STOPS, str(error))])


_check: ChunkChecker | None = None


def _start_worker(check: ChunkChecker) -> None:
    global _check
    worker_process.follow_parent()  # Which decides when to stop.
    _check = check


def _check_in_worker(task: Task) -> list[Checked]:
    assert _check is not None
    return _check(task)


def check_all(
    check: ChunkChecker, tasks: Iterator[Task], workers: int
) -> Generator[tuple[Task, list[Checked]], None, None]:
    """Every task with its outcome, in the order of the tasks; 0 workers: in this process.

    Raises:
      RuntimeError: a worker died, naming where.
    """
    if not workers:
        yield from ((task, check(task)) for task in tasks)
        return
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, mp_context=context, initializer=_start_worker, initargs=(check,)
    )
    waiting: collections.deque[tuple[Task, concurrent.futures.Future]] = collections.deque()
    try:
        for task in tasks:
            waiting.append((task, pool.submit(_check_in_worker, task)))
            if len(waiting) == _AHEAD * workers:
                yield _outcome(*waiting.popleft())
        while waiting:
            yield _outcome(*waiting.popleft())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _outcome(task: Task, future: concurrent.futures.Future) -> tuple[Task, list[Checked]]:
    try:
        return task, future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            f"a worker died at or soon after record {task.start} of source {task.source}; "
            "without workers, a smaller limit finds the record"
        ) from error
