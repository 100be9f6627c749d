"""Examples are put in rows, rows become a batch of fixed shape.

A batch has B rows of L positions in G groups of B / G neighbouring rows; the rows of a group share
a pool of I tiles. `packing` decides in which row an example goes; `assemble` writes the arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from bluelm_jax import layout as layouts
from bluelm_jax.checks import check, check_positive
from bluelm_jax.data.examples import Example
from bluelm_jax.data_config import DataConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchShape:
    """All sizes of a batch.

    Attributes:
      batch_size: rows, B.
      seq_len: positions of a row, L.
      tile_groups: groups of rows, G.
      tiles_per_group: tiles of a group, I.
      tile_size: side of a tile in pixels, S.
      tokens_per_view: tokens of a view, Q.
      max_samples_per_row: samples that one row may hold; None for no bound.
      pad_id: id at positions without a token.
      corners: whether batches hold corner_index and corner_weights.
    """

    batch_size: int
    seq_len: int
    tile_groups: int
    tiles_per_group: int
    tile_size: int
    tokens_per_view: int
    max_samples_per_row: int | None = 1
    pad_id: int = 0
    corners: bool = False

    def __post_init__(self):
        check_positive(self, "batch_size", "seq_len", "tile_groups", "tile_size", "tokens_per_view")
        check(self, "tiles_per_group", self.tiles_per_group >= 0, ">= 0")
        even = self.batch_size % self.tile_groups == 0
        check(self, "tile_groups", even, f"a divisor of batch_size = {self.batch_size}")

    @classmethod
    def of(cls, config: DataConfig, *, side: layouts.Side, pad_id: int) -> BatchShape:
        """The shape of a config's batches."""
        limit = 1 if config.packing is None else config.packing.max_samples_per_row
        return cls(
            batch_size=config.batch_size,
            seq_len=config.seq_len,
            tile_groups=config.tile_groups,
            tiles_per_group=config.tiles_per_group,
            tile_size=config.tiling.tile_size,
            tokens_per_view=layouts.tokens_per_view(side),
            max_samples_per_row=limit,
            pad_id=pad_id,
            corners=layouts.resizes(config.layout),
        )

    def group(self, row: int) -> int:
        """The group that a row belongs to."""
        return row * self.tile_groups // self.batch_size


def empty_example(shape: BatchShape, name: str) -> Example:
    """What stands in a row that stays empty."""
    size = shape.tile_size
    return Example(
        name=name,
        tokens=np.zeros(0, np.int32),
        supervised=np.zeros(0, bool),
        image_index=np.zeros(0, np.int32),
        tiles=np.zeros((0, size, size, 3), np.uint8),
    )


def assemble(placed: Sequence[tuple[int, Example]], shape: BatchShape) -> dict[str, np.ndarray]:
    """Writes placed examples into the arrays of a batch.

    Args:
      placed: (row, example) in the order of placing; a row's samples stand in that order, and a
        group's tiles too.
      shape: the batch's sizes.

    Returns:
      The fields of `bluelm_jax.batch.Batch` as NumPy arrays. Positions without a sample hold the
      pad id, segment 0 and weight 0.

    Raises:
      ValueError: a row or a group overflows, naming the sample and both numbers.
    """
    batch = _empty(shape)
    used = np.zeros(shape.batch_size, np.int64)
    tiles_used = np.zeros(shape.tile_groups, np.int64)
    segments = np.zeros(shape.batch_size, np.int32)
    for row, example in placed:
        group = shape.group(row)
        start, first_tile = int(used[row]), int(tiles_used[group])
        stop, tile_stop = start + example.length, first_tile + example.num_views
        _check_room(example, stop, tile_stop, row, group, shape)
        span = slice(start, stop)
        segments[row] += 1
        batch["tokens"][row, span] = example.tokens
        batch["loss_weights"][row, span] = example.supervised
        batch["positions"][row, span] = np.arange(example.length)
        batch["segments"][row, span] = segments[row]
        index = example.image_index
        offset = first_tile * shape.tokens_per_view
        batch["image_index"][row, span] = np.where(index >= 0, index + offset, index)
        if example.corner_index is not None:
            batch["corner_index"][row, span] = example.corner_index + offset
            batch["corner_weights"][row, span] = example.corner_weights
        batch["tiles"][group, first_tile:tile_stop] = example.tiles
        used[row], tiles_used[group] = stop, tile_stop
    return batch


def _empty(shape: BatchShape) -> dict[str, np.ndarray]:
    rows = (shape.batch_size, shape.seq_len)
    size = shape.tile_size
    tiles = (shape.tile_groups, shape.tiles_per_group, size, size, 3)
    corners = {
        "corner_index": np.zeros((*rows, 4), np.int32),
        "corner_weights": np.zeros((*rows, 4), np.float32),
    }
    return {
        "tokens": np.full(rows, shape.pad_id, np.int32),
        "loss_weights": np.zeros(rows, np.float32),
        "positions": np.zeros(rows, np.int32),
        "segments": np.zeros(rows, np.int32),
        "image_index": np.full(rows, layouts.TEXT, np.int32),
        "tiles": np.zeros(tiles, np.uint8),
        **(corners if shape.corners else {}),
    }


def _check_room(
    example: Example, stop: int, tile_stop: int, row: int, group: int, shape: BatchShape
) -> None:
    if stop > shape.seq_len:
        raise ValueError(
            f"{example.name}: row {row} would hold {stop} positions, seq_len = {shape.seq_len}"
        )
    if tile_stop > shape.tiles_per_group:
        raise ValueError(
            f"{example.name}: group {group} would hold {tile_stop} tiles, "
            f"tiles_per_group = {shape.tiles_per_group}"
        )


def batch_prompts(
    prompts: Sequence[Example],
    shape: BatchShape,
) -> dict[str, np.ndarray]:
    """Prompts padded on the right, one a row, for generation.

    Args:
      prompts: at most `shape.batch_size` prompts; rows without one are empty.
      shape: the batch's sizes.

    Returns:
      What `assemble` returns, and `lengths` int32 [B], the positions of each prompt.

    Raises:
      ValueError: there are more prompts than rows, or one does not fit, naming it.
    """
    if len(prompts) > shape.batch_size:
        raise ValueError(f"{len(prompts)} prompts for batch_size = {shape.batch_size}")
    batch = assemble(list(enumerate(prompts)), shape)
    lengths = np.zeros(shape.batch_size, np.int32)
    lengths[: len(prompts)] = [prompt.length for prompt in prompts]
    return {**batch, "lengths": lengths}
