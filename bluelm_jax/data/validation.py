"""Checks every record of a data set before a run spends hours to find the bad ones."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

import numpy as np

from bluelm_jax.data.counters import Counters
from bluelm_jax.data.examples import Skipped
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data.sources import InvalidRecordError, Records
from bluelm_jax.data_config import DataConfig, SourceConfig

# What only informs; every other counter is a problem.
NOTES = ("leading_turns_left_out", "samples")
_PERCENTILES = (0, 50, 90, 99, 100)


@dataclasses.dataclass(frozen=True)
class Report:
    """What was found in one source.

    Attributes:
      path: the file.
      counters: problems and notes, by reason, with names.
      lengths: positions of each readable sample.
      views: tiles of each readable sample.
    """

    path: str
    counters: Counters
    lengths: np.ndarray
    views: np.ndarray

    @property
    def problems(self) -> int:
        """Events that are not mere notes."""
        return sum(n for reason, n in self.counters.counts.items() if reason not in NOTES)

    def lines(self) -> Iterator[str]:
        """The report as text."""
        yield f"{self.path}: {self.counters.counts.get('samples', 0)} records"
        for name, values in (("positions", self.lengths), ("tiles", self.views)):
            if len(values):
                at = np.percentile(values, _PERCENTILES)
                shown = ", ".join(f"{p} % {v:.0f}" for p, v in zip(_PERCENTILES, at, strict=True))
                yield f"  {name}: {shown}"
        for reason, count in sorted(self.counters.counts.items()):
            if reason != "samples":
                yield f"  {reason}: {count}"
                yield from (f"    {name}" for name in self.counters.names.get(reason, ()))


def lenient(config: DataConfig) -> DataConfig:
    """`config` with every policy set to leave out what it would raise for."""
    return dataclasses.replace(
        config,
        on_invalid_record="skip",
        on_unreadable_image="skip",
        on_overlong="drop",
        on_too_many_tiles="skip",
    )


def validate(
    config: DataConfig, *, side: int, decode: bool = False, limit: int = 0
) -> list[Report]:
    """Checks the records of every source, in file order.

    Found are records that cannot be read or break a rule, images that are missing or damaged,
    samples that are longer than `seq_len` or have more tiles than `tiles_per_group`, and ids that
    occur more than once.

    Args:
      config: the data config.
      side: tokens along one side of a view.
      decode: decode every image; else its header alone is read.
      limit: records of each source to check; 0 checks all.

    Returns:
      A report for each source.
    """
    pipeline = Pipeline(lenient(config), side=side)
    return [
        _validate_source(pipeline, source, records, decode, limit)
        for source, records in zip(config.sources, pipeline.records, strict=True)
    ]


def _validate_source(
    pipeline: Pipeline, source: SourceConfig, records: Records, decode: bool, limit: int
) -> Report:
    counters = Counters(pipeline.config.max_names)
    sizes: list[tuple[int, int]] = []
    ids: collections.Counter[str] = collections.Counter()
    for i in range(min(len(records), limit or len(records))):
        counters.add("samples")
        try:
            record = records[i]
        except InvalidRecordError as error:
            counters.add("invalid_record", str(error))
            continue
        make = pipeline.maker.make if decode else pipeline.maker.make_plan
        made = make(record, source, records.where(i))
        if isinstance(made, Skipped):
            counters.add(made.reason, made.detail)
            continue
        for reason, detail in made.events:
            counters.add(reason, detail)
        sizes.append((made.length, made.num_views))
        if "id" in record:
            name = repr(record["id"])
            ids[name] += 1
            if ids[name] > 1:
                counters.add("duplicate_id", f"{name} again at {records.where(i)}")
    lengths, views = np.array(sizes, np.int64).reshape(-1, 2).T
    return Report(source.path, counters, lengths, views)
