"""How long samples are, how many tiles batches hold and how full packing makes them.

All of it from image headers alone: no pixel is decoded.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from bluelm_jax.data import packing
from bluelm_jax.data.batching import BatchShape
from bluelm_jax.data.examples import ExampleMaker, advise
from bluelm_jax.data.packing import Size
from bluelm_jax.data.plans import UnreadableImageError
from bluelm_jax.data.sample_plan import truncate
from bluelm_jax.data.sources import InvalidRecordError, Records
from bluelm_jax.data_config import Packing

# What packing is to reach; `choose_tiles` balances both against these.
POSITION_GOAL, TILE_GOAL = 0.95, 0.98


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Sizes of samples and batches.

    Attributes:
      max_length: positions of the longest sample.
      max_views: tiles of the sample with most of them.
      tiles_per_group: least bound that holds every group of every batch.
      mean_length, mean_views: means over samples.
    """

    max_length: int
    max_views: int
    tiles_per_group: int
    mean_length: float
    mean_views: float


def measure(
    order: grain.MapDataset,
    records: Sequence[Records],
    maker: ExampleMaker,
    num_batches: int,
    prompts: bool = False,
    period: int = sys.maxsize,
) -> Measurement:
    """Sizes of the first `num_batches` batches of an order of (source, record) pairs.

    One sample a row; bounds of the config play no part. See `Pipeline.measure`. `period` is the
    number of places after which the order brings nothing new.

    Raises:
      InvalidRecordError, UnreadableImageError: unless the policy deals with them.
    """
    rows = num_batches * maker.config.batch_size
    sizes = _sizes(order, records, maker, rows, prompts=prompts, period=period)
    lengths = np.array([length for length, _ in sizes], np.int64)
    views = np.array([views for _, views in sizes], np.int64)
    padded = np.zeros(rows, np.int64)
    padded[: len(views)] = views
    groups = padded.reshape(-1, maker.config.rows_per_group).sum(axis=1)
    return Measurement(
        max_length=int(lengths.max(initial=0)),
        max_views=int(views.max(initial=0)),
        tiles_per_group=int(groups.max(initial=0)),
        mean_length=float(lengths.mean()) if sizes else 0.0,
        mean_views=float(views.mean()) if sizes else 0.0,
    )


@dataclasses.dataclass(frozen=True)
class Fill:
    """How full batches are, their first and last left out if there are others.

    Attributes:
      tiles_per_group: tiles that each group offers.
      position_fill: share of the positions that hold a sample's token.
      tile_fill: share of the tile slots that hold a sample's tile; 1 if there are none.
      batches: how many were counted.
    """

    tiles_per_group: int
    position_fill: float
    tile_fill: float
    batches: int

    @property
    def margin(self) -> float:
        """The lesser of what the fills have over their goals."""
        return min(self.position_fill - POSITION_GOAL, self.tile_fill - TILE_GOAL)


def fill(sizes: Sequence[Size], shape: BatchShape, rule: Packing) -> Fill:
    """Packs samples of the given sizes as a run would, and counts.

    Raises:
      ValueError: a sample has more positions than a row or more tiles than a group.
    """
    for size in sizes:
        if size.length > shape.seq_len or size.num_views > shape.tiles_per_group:
            bounds = f"seq_len = {shape.seq_len}, tiles_per_group = {shape.tiles_per_group}"
            raise ValueError(f"a sample of {size} does not fit: {bounds}")
    stream, queue, counts = iter(sizes), [], []
    while True:
        filled = packing.fill(shape, rule, queue, lambda: next(stream, None))
        queue = filled.waiting
        if not filled.placed:
            break
        used = [size for _, size in filled.placed]
        counts.append((sum(s.length for s in used), sum(s.num_views for s in used)))
    inner = counts[1:-1] if len(counts) > 2 else counts
    positions, tiles = np.array(inner, np.int64).reshape(-1, 2).sum(axis=0)
    room = max(1, len(inner)) * shape.batch_size * shape.seq_len
    slots = max(1, len(inner)) * shape.tile_groups * shape.tiles_per_group
    tile_fill = float(tiles / slots) if slots else 1.0
    return Fill(shape.tiles_per_group, float(positions / room), tile_fill, len(inner))


def choose_tiles(sizes: Sequence[Size], shape: BatchShape, rule: Packing) -> Fill:
    """The number of tiles a group that suits samples of the given sizes, and the fill with it.

    With more tiles fewer positions stay empty and more tile slots do. Bisection finds where the
    margins over both goals meet. No sample is left without room.
    """

    def at(tiles: int) -> Fill:
        return fill(sizes, dataclasses.replace(shape, tiles_per_group=tiles), rule)

    positions, views = np.array(sizes, np.int64).reshape(-1, 2).sum(axis=0)
    even = views / max(1, positions) * shape.seq_len * shape.batch_size / shape.tile_groups
    low = max((size.num_views for size in sizes), default=0)
    high = max(low, round(1.1 * even) + 1)
    while low < high:
        middle = (low + high) // 2
        found = at(middle)
        if found.position_fill - POSITION_GOAL < found.tile_fill - TILE_GOAL:
            low = middle + 1
        else:
            high = middle
    least = max((size.num_views for size in sizes), default=0)
    return max((at(t) for t in {low, max(least, low - 1)}), key=lambda found: found.margin)


def packed_sizes(
    order: grain.MapDataset,
    records: Sequence[Records],
    maker: ExampleMaker,
    count: int,
    period: int = sys.maxsize,
) -> list[Size]:
    """Sizes of the first `count` samples that are not left out, cut to a row where policy says so.

    Raises:
      InvalidRecordError, UnreadableImageError: unless the policy deals with them.
    """
    sizes = _sizes(order, records, maker, count, maker.config.seq_len, period=period)
    return [Size(*size) for size in sizes]


def _sizes(
    order: grain.MapDataset,
    records: Sequence[Records],
    maker: ExampleMaker,
    count: int,
    limit: int | None = None,
    prompts: bool = False,
    period: int = sys.maxsize,
) -> list[tuple[int, int]]:
    """(positions, tiles) of the first `count` samples that are not left out.

    With a `limit`, longer samples are left out, or cut if that is the policy.
    """
    known: dict[tuple[int, int], tuple[int, int] | None] = {}
    sizes: list[tuple[int, int]] = []
    total = sum(map(len, records))
    for place in range(len(order)):
        if len(sizes) == count:
            break
        key: Any = order[place]
        source, index = key
        if key not in known:
            known[key] = _size(maker, records[source], source, index, limit, prompts)
        size = known[key]
        if size is not None:
            sizes.append(size)
        elif not sizes and (len(known) == total or place + 1 >= period):
            break  # Every sample is left out: an endless stream would never end.
    return sizes


def _size(
    maker: ExampleMaker,
    records: Records,
    source: int,
    index: int,
    limit: int | None,
    prompts: bool,
) -> tuple[int, int] | None:
    """(positions, tiles) of a sample; None if a policy skips it."""
    config = maker.config
    try:
        plan = maker.plan_by_policy(
            records[index], config.sources[source], records.where(index), prompt=prompts
        )
        if limit is not None and plan.length > limit:
            if config.on_overlong != "truncate_text":
                return None
            plan = truncate(plan, limit)
        return plan.length, plan.num_views
    except InvalidRecordError as error:
        if config.on_invalid_record == "raise":
            advise(error)
            raise
    except UnreadableImageError as error:
        if config.on_unreadable_image == "raise":
            advise(error)
            raise
    return None
