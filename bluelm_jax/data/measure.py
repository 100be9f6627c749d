"""How long samples are and how many tiles batches hold, from image headers alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from bluelm_jax.data.examples import ExampleMaker
from bluelm_jax.data.plans import UnreadableImageError
from bluelm_jax.data.sources import InvalidRecordError, Records


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
    order: grain.MapDataset, records: Sequence[Records], maker: ExampleMaker, num_batches: int
) -> Measurement:
    """Sizes of the first `num_batches` batches of an order of (source, record) pairs.

    One sample a row; bounds of the config play no part. See `Pipeline.measure`.

    Raises:
      InvalidRecordError, UnreadableImageError: unless the policy deals with them.
    """
    rows = num_batches * maker.config.batch_size
    sizes = _sizes(order, records, maker, rows)
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


def _sizes(
    order: grain.MapDataset, records: Sequence[Records], maker: ExampleMaker, count: int
) -> list[tuple[int, int]]:
    """(positions, tiles) of the first `count` samples that are not left out."""
    known: dict[tuple[int, int], tuple[int, int] | None] = {}
    sizes: list[tuple[int, int]] = []
    total = sum(map(len, records))
    for place in range(len(order)):
        if len(sizes) == count:
            break
        key: Any = order[place]
        source, index = key
        if key not in known:
            known[key] = _size(maker, records[source], source, index)
        size = known[key]
        if size is not None:
            sizes.append(size)
        elif len(known) == total and not any(known.values()):
            break  # Every sample is left out: an endless stream would never end.
    return sizes


def _size(maker: ExampleMaker, records: Records, source: int, index: int) -> tuple[int, int] | None:
    """(positions, tiles) of a sample; None if a policy skips it."""
    config = maker.config
    try:
        plan = maker.plan_by_policy(records[index], config.sources[source], records.where(index))
        return plan.length, plan.num_views
    except InvalidRecordError:
        if config.on_invalid_record == "raise":
            raise
    except UnreadableImageError:
        if config.on_unreadable_image == "raise":
            raise
    return None
