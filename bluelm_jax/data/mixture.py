"""Which sample of which source stands at which place, and a table of what that amounts to.

Places have random access: the sample at one is a function of place, seed and config. Mixed by
weight, sources take turns in proportion, each going through its own epochs. Mixed by repeat, an
epoch is a union: n records with repeat r give n * r samples, rounded. A source whose share of an
epoch is no multiple of its records goes on in the next epoch where it stopped, so over a whole run
no record comes twice more than another of its source.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from bluelm_jax.data.opening import Subset, open_records
from bluelm_jax.data.prepare import Key
from bluelm_jax.data.sources import Records
from bluelm_jax.data_config import DataConfig, SourceConfig

_MAX_PLACES = 2**32  # grain shuffles 32-bit numbers.


def order(config: DataConfig, counts: Sequence[int]) -> grain.MapDataset:
    """(source, record) of every place.

    Args:
      config: the sources and how they mix.
      counts: records of each source.

    Raises:
      ValueError: a source contributes no sample, or an epoch has 2^32 or more.
    """
    streams = [_stream(config, i, count) for i, count in enumerate(counts)]
    if by_repeat(config):
        sizes = epoch_sizes(config.sources, counts)
        seed = _seed(config, len(counts)) if config.shuffle else None
        epochs = Union(streams, sizes, seed)
        length = sys.maxsize if config.epochs is None else config.epochs * sum(sizes)
        return grain.MapDataset.range(length).map(epochs)
    if len(streams) == 1:
        return streams[0].repeat(config.epochs)
    weights = [source.weight for source in config.sources]
    mixed = grain.MapDataset.mix([stream.repeat(None) for stream in streams], weights)
    if config.epochs is None:
        return mixed
    # Grain's own length rounds down, and may end before the last record of any source.
    return mixed[: _first_through(proportions(weights), [config.epochs * n for n in counts])]


def proportions(weights: Sequence[float]) -> list[int]:
    """The whole numbers in whose proportion grain mixes; the least weight becomes 100."""
    scale = 100 / min(weights)
    return [int(weight * scale) for weight in weights]


def _first_through(parts: Sequence[int], sizes: Sequence[int]) -> int:
    """Places of a mixture before the one at which it is the turn of a source that is through."""

    def given(source: int, places: int) -> int:
        """Samples that a source gives to the first places: grain deals one source after another."""
        left = sum(parts)
        for part in parts[:source]:
            places, left = places * (left - part) // left, left - part
        return places - places * (left - parts[source]) // left

    places = range(sum(parts) * (max(sizes) + 2))
    return min(
        bisect.bisect_right(places, size, key=functools.partial(given, source)) - 1
        for source, size in enumerate(sizes)
    )


def period(config: DataConfig, counts: Sequence[int]) -> int:
    """Places after which the order comes again; without an end where it is shuffled.

    So a host that reads every n-th place has seen all that it will ever see after as many of its own.
    """
    if config.shuffle:
        return sys.maxsize
    if len(counts) == 1 and not by_repeat(config):
        return counts[0]
    if by_repeat(config):
        steps = epoch_sizes(config.sources, counts)
    else:
        steps = proportions([source.weight for source in config.sources])
        common = math.gcd(*steps)
        steps = [step // common for step in steps]
    rounds = [n // math.gcd(n, step) for n, step in zip(counts, steps, strict=True)]
    return sum(steps) * math.lcm(*rounds)


def by_repeat(config: DataConfig) -> bool:
    """Whether sources are mixed by repeat."""
    return config.sources[0].repeat is not None


def epoch_sizes(sources: Sequence[SourceConfig], counts: Sequence[int]) -> list[int]:
    """Samples that each source gives to one epoch of a mixture by repeat."""
    sizes = [
        math.floor((source.repeat or 1) * count + 0.5)
        for source, count in zip(sources, counts, strict=True)
    ]
    for source, size, count in zip(sources, sizes, counts, strict=True):
        if size == 0:
            raise ValueError(f"{source.path}: repeat = {source.repeat} of {count} records is none")
    if sum(sizes) >= _MAX_PLACES:
        raise ValueError(f"an epoch of {sum(sizes)} samples; it must have fewer than 2^32")
    return sizes


def _seed(config: DataConfig, index: int) -> int:
    return int(np.random.SeedSequence([config.seed, index]).generate_state(1)[0])


def _stream(config: DataConfig, index: int, count: int) -> grain.MapDataset:
    """One pass over a source; a place beyond it belongs to a later, otherwise shuffled pass."""
    stream = grain.MapDataset.range(count).map(Key(index))
    return stream.shuffle(seed=_seed(config, index)) if config.shuffle else stream


class Union:
    """(source, record) of a place, where epoch e has the samples e * size.. of every stream.

    Args:
      streams: one for each source, valid for every place from 0 on.
      sizes: samples of each in an epoch.
      seed: shuffles every epoch anew; None puts one source after the other.
    """

    def __init__(self, streams: Sequence[grain.MapDataset], sizes: Sequence[int], seed: int | None):
        self._streams, self._sizes = list(streams), list(sizes)
        self._ends = np.cumsum(self._sizes)
        places = grain.MapDataset.range(int(self._ends[-1]))
        self._places = places if seed is None else places.shuffle(seed=seed)

    def __call__(self, place: int) -> tuple[int, int]:
        """(source, record)."""
        epoch = int(place) // int(self._ends[-1])
        found: Any = self._places[int(place)]
        at = int(found)
        source = int(np.searchsorted(self._ends, at, "right"))
        size = self._sizes[source]
        key: Any = self._streams[source][epoch * size + at - (int(self._ends[source]) - size)]
        return key


@dataclasses.dataclass(frozen=True)
class Share:
    """A source's part of a run.

    Attributes:
      name: of the source.
      records: how many it has; None where it could not be opened.
      used: how many of them it uses.
      problem: why it could not be opened.
      setting: its weight or repeat.
      share: of all samples; None where other sources are unknown.
      samples: in the run; None as for share.
    """

    name: str
    records: int | None
    used: int | None
    problem: str
    setting: float
    share: float | None
    samples: float | None

    @property
    def epochs(self) -> float | None:
        """How often each used record comes, on average."""
        return self.samples / self.used if self.samples and self.used else None


def shares(
    config: DataConfig, samples: int, records: Sequence[Records] | None = None
) -> list[Share]:
    """What each source gives to a run of `samples` samples.

    With finite epochs the run has at most as many samples as those. A source that cannot be opened
    has its `problem` instead of numbers.

    Args:
      records: the sources' records (`opening.open_records`); None opens them.
    """
    opened = records or [None] * len(config.sources)
    found = [_count(config, *pair) for pair in zip(config.sources, opened, strict=True)]
    counts = [used for _, used, _ in found]
    known = all(problem == "" for _, _, problem in found)
    parts: list[float | None] = [None] * len(counts)
    if not by_repeat(config):
        total = sum(source.weight for source in config.sources)
        parts = [source.weight / total for source in config.sources]
    elif known:
        sizes = epoch_sizes(config.sources, counts)
        parts = [size / sum(sizes) for size in sizes]
    if known and config.epochs is not None:
        samples = min(samples, len(order(config, counts)))
    return [
        Share(
            name=source.label,
            records=None if problem else count,
            used=None if problem else used,
            problem=problem,
            setting=source.weight if source.repeat is None else source.repeat,
            share=part,
            samples=None if part is None else part * samples,
        )
        for source, part, (count, used, problem) in zip(config.sources, parts, found, strict=True)
    ]


def _count(
    config: DataConfig, source: SourceConfig, records: Records | None
) -> tuple[int, int, str]:
    """Records of a source, how many it uses, and '' or what is wrong with it."""
    try:
        chosen = open_records(source, config.seed) if records is None else records
    except (ValueError, OSError) as error:
        return 0, 0, str(error)
    count = len(chosen.whole if isinstance(chosen, Subset) else chosen)
    return count, len(chosen), "" if len(chosen) else f"{source.path}: holds no record"


def table(
    config: DataConfig, steps: int, rows: int, records: Sequence[Records] | None = None
) -> str:
    """The mixture as text, for the start of a run.

    Args:
      config: the sources.
      steps: of the run.
      rows: of a step, on all hosts together.
      records: as for `shares`.
    """
    found = shares(config, steps * rows, records)
    return "\n".join(_lines(config, found))


def _lines(config: DataConfig, found: Sequence[Share]) -> Iterator[str]:
    kind = "repeat" if by_repeat(config) else "weight"
    width = max(6, *(len(share.name) for share in found))
    yield f"data: {len(found)} source{'s' * (len(found) > 1)}, mixed by {kind}"
    yield (
        f"  {'source':<{width}} {'records':>13} {'used':>13} {kind:>9} {'share':>7} {'samples':>14} "
        f"{'epochs':>8}"
    )
    for share in found:
        missing = "not found" if "no such file" in share.problem else "unusable"
        records = f"{missing:>13}" if share.problem else _number(share.records, "13,")
        percent = _number(None if share.share is None else 100 * share.share, "5.1f")
        yield (
            f"  {share.name:<{width}} {records} {_number(share.used, '13,')} {share.setting:>9g} "
            f"{percent} % {_number(share.samples, '14,.0f')} {_number(share.epochs, '8.2f')}"
        )
    yield from (f"  {share.name}: {share.problem}" for share in found if share.problem)
    if config.packing is not None:
        yield "  samples and epochs count one sample a row; packing reads more"


def _number(value: float | None, form: str) -> str:
    width = int(form.split(",")[0].split(".")[0])
    return f"{'-':>{width}}" if value is None else f"{value:{form}}"
