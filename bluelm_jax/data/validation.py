"""Checks every record of a data set before a run spends hours to find the bad ones.

Memory is bounded: findings are handed on as they come, sizes are counted by value, and duplicates
are told by eight bytes a record and kind of duplicate.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import numpy as np

from bluelm_jax.data import duplicates
from bluelm_jax.data.check_workers import ChunkChecker, Task, check_all
from bluelm_jax.data.findings import KINDS, SEVERITIES, Finding
from bluelm_jax.data.image_bytes import image_name
from bluelm_jax.data.opening import open_records
from bluelm_jax.data.plans import Planner
from bluelm_jax.data.sample_checks import Checked, SampleChecker, id_of, name_key
from bluelm_jax.data.sources import MemoryRecords, Records, image_files
from bluelm_jax.data_config import DataConfig
from bluelm_jax.layout import Side

_CHUNK = 64  # Records handed to a worker at once; Ctrl-C waits for as many.


@dataclasses.dataclass
class SourceReport:
    """What was found in one source.

    Attributes:
      path: the file.
      records: records of the file; 0 where it cannot be read.
      checked: records that were looked at.
      kinds: findings of each kind.
      counters: what a run's counters say after one pass with the config's own policies, and
        'stops_the_run' for samples at which a policy raises.
      examples: the first findings of each kind.
      lengths, views: samples that fit, by their positions and by their tiles.
    """

    path: str
    records: int = 0
    checked: int = 0
    kinds: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    counters: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    examples: dict[str, list[Finding]] = dataclasses.field(default_factory=dict)
    lengths: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    views: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass
class Report:
    """What was found in all sources; `partial` if the check was broken off."""

    sources: list[SourceReport]
    partial: bool = False

    def count(self, least: str = "error") -> int:
        """Findings of a severity or a worse one."""
        counted = SEVERITIES[: SEVERITIES.index(least) + 1]
        return sum(
            n
            for s in self.sources
            for kind, n in s.kinds.items()
            if KINDS[kind].severity in counted
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How to check.

    Attributes:
      decode: decode every image; else its header alone is read.
      limit: records of each source to check, from its start; 0 checks all.
      workers: processes; 0 checks in this one. The result does not depend on it.
      min_side: images with a shorter side get a warning.
      max_examples: findings of each kind that a report keeps.
    """

    decode: bool = False
    limit: int = 0
    workers: int = 0
    min_side: int = 16
    max_examples: int = 20


_DEFAULTS = Options()


def validate(
    config: DataConfig,
    *,
    side: Side,
    options: Options = _DEFAULTS,
    on_finding: Callable[[Finding], None] = lambda finding: None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Report:
    """Checks the records of every source, in file order.

    Args:
      config: the data config.
      side: tokens along one side of a view, or unordered ones (`layout.token_side`).
      options: how to check.
      on_finding: takes every finding as it comes; duplicates come last.
      on_progress: takes records done and records in all.
      should_stop: asked after every few records; True ends the check with a partial report.

    Raises:
      ValueError: the config itself is wrong; a template needs a token that the tokenizer lacks.
      RuntimeError: a worker process died.
    """
    return _Validation(config, side, options, on_finding).run(on_progress, should_stop)


class _Validation:
    """One call of `validate`."""

    def __init__(
        self, config: DataConfig, side: Side, options: Options, on_finding: Callable[..., None]
    ):
        planner = Planner(config, side=side)
        self._sources, self._options, self._on_finding = config.sources, options, on_finding
        self._seed = config.seed
        self._report = Report([SourceReport(source.path) for source in config.sources])
        self._records = [self._open(i) for i in range(len(config.sources))]
        self._duplicates = duplicates.Duplicates()
        checker = SampleChecker(planner, decode=options.decode, min_side=options.min_side)
        self._check = ChunkChecker(checker, self._records, self._sources)

    def _open(self, index: int) -> Records:
        source = self._sources[index]
        try:
            records = open_records(source, self._seed)
        except (ValueError, OSError) as error:
            detail = str(error).removeprefix(f"{source.path}: ")
            self._add_finding(index, Finding("unreadable_source", source.path, detail=detail))
            return MemoryRecords([], source.path)
        self._report.sources[index].records = len(records)
        if len(records) == 0:
            self._add_finding(index, Finding("empty_source", source.path))
        return records

    def run(
        self, on_progress: Callable[[int, int], None], should_stop: Callable[[], bool]
    ) -> Report:
        """Checks everything."""
        total = sum(self._count(i) for i in range(len(self._records)))
        done = 0
        on_progress(done, total)
        outcomes = check_all(self._check, self._tasks(), self._options.workers)
        with contextlib.closing(outcomes):
            for task, chunk in outcomes:
                for checked in chunk:
                    self._add(task.source, checked)
                done += len(chunk)
                on_progress(done, total)
                if should_stop():
                    self._report.partial = done < total
                    break
        self._add_duplicates()
        return self._report

    def _count(self, index: int) -> int:
        count = len(self._records[index])
        return min(count, self._options.limit or count)

    def _tasks(self) -> Iterator[Task]:
        for i in range(len(self._records)):
            count = self._count(i)
            for start in range(0, count, _CHUNK):
                yield Task(i, start, min(start + _CHUNK, count))

    def _add(self, source: int, checked: Checked) -> None:
        report = self._report.sources[source]
        for finding in checked.findings:
            self._add_finding(source, finding)
        report.counters.update(reason for reason, _ in checked.events)
        if checked.size is not None:
            report.lengths[checked.size[0]] += 1
            report.views[checked.size[1]] += 1
        self._duplicates.add(checked.id_key, checked.sample_key, checked.image_keys)
        report.checked += 1

    def _add_finding(self, source: int, finding: Finding) -> None:
        report = self._report.sources[source]
        report.kinds[finding.kind] += 1
        kept = report.examples.setdefault(finding.kind, [])
        if len(kept) < self._options.max_examples:
            kept.append(finding)
        self._on_finding(finding)

    def _add_duplicates(self) -> None:
        starts = np.cumsum([0, *(source.checked for source in self._report.sources)])

        def place(number: int) -> tuple[int, int]:
            source = int(np.searchsorted(starts, number, "right")) - 1
            return source, number - int(starts[source])

        for found in self._duplicates.find():
            (source, index), (of, like) = place(found.again), place(found.first)
            record = self._records[source][index]  # Only what could be read has a key.
            files = image_files(record, "") if found.name else []
            same = (i for i, f in enumerate(files) if name_key(f) == found.name)
            at = next(same, None)
            other = "" if of == source else f" of {self._sources[of].path}"
            finding = Finding(
                found.kind,
                self._sources[source].path,
                index,
                id_of(record),
                place="" if at is None else f"image {at}",
                file="" if at is None else image_name(files[at]),
                where=self._records[source].where(index),
                detail=f"as record {like}{other}",
            )
            self._add_finding(source, finding)
