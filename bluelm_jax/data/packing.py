"""Which samples share a batch, and in which row each goes, from lengths and tile counts alone.

A batch offers two kinds of room: L positions a row, and I tiles a group of rows. `FirstFit` takes
samples as they come. `fill_rows` fills one row after the other with the set of waiting samples that
leaves least of both kinds unused. Neither sees a token or a pixel, so what packing will do can be
computed from image headers (`Pipeline.measure_packing`) by the code of a run.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from bluelm_jax.data.batching import BatchShape
from bluelm_jax.data_config import Packing


@runtime_checkable
class Sized(Protocol):
    """What takes room: `length` positions and `num_views` tiles."""

    @property
    def length(self) -> int:
        """Positions."""
        ...

    @property
    def num_views(self) -> int:
        """Tiles."""
        ...


class Size(NamedTuple):
    """The room that a sample takes, without the sample."""

    length: int
    num_views: int


S = TypeVar("S", bound=Sized)


@dataclasses.dataclass(frozen=True)
class Filled(Generic[S]):
    """One batch's samples.

    Attributes:
      placed: (row, sample), in the order of placing.
      waiting: samples left for the next batch, first come first.
      partial: the data ended, nothing waits, and a row has positions free and fewer samples than it
        may hold. Tiles play no part, since a sample may have none.
    """

    placed: list[tuple[int, S]]
    waiting: list[S]
    partial: bool


MOST_BITS = 2**26  # Of sums in one search, where `max_samples_per_row` multiplies them: 8 MiB.

Read = Callable[[], S | None]
Unplaced = Callable[[S, "FirstFit", Sequence[tuple[int, S]]], None]


class FirstFit:
    """Each sample goes to the first row with room for its positions and its tiles."""

    def __init__(self, shape: BatchShape):
        self._shape = shape
        self._free_positions = [shape.seq_len] * shape.batch_size
        self._free_tiles = [shape.tiles_per_group] * shape.tile_groups
        self._samples = [0] * shape.batch_size
        self._open = list(range(shape.batch_size))  # Rows that may still take a sample.

    def place(self, length: int, num_views: int) -> int | None:
        """Row for a sample of `length` positions and `num_views` tiles; None if none has room."""
        for row in self._open:
            group = self._shape.group(row)
            if self._free_positions[row] >= length and self._free_tiles[group] >= num_views:
                self._take(row, group, length, num_views)
                return row
        return None

    def _take(self, row: int, group: int, length: int, num_views: int) -> None:
        self._free_positions[row] -= length
        self._free_tiles[group] -= num_views
        self._samples[row] += 1
        if self._free_positions[row] == 0 or self._samples[row] == self._shape.max_samples_per_row:
            self._open.remove(row)

    def full_group(self, length: int) -> int | None:
        """The first group with a row for `length` positions: after a failed `place`, the full one.

        None if no row has room whatever the tiles.
        """
        free = self._free_positions
        return next((self._shape.group(r) for r in self._open if free[r] >= length), None)

    @property
    def is_full(self) -> bool:
        """No row can take another sample of any length."""
        return not self._open


def fill(
    shape: BatchShape,
    packing: Packing | None,
    queue: Sequence[S],
    read: Read[S],
    unplaced: Unplaced[S] | None = None,
) -> Filled[S]:
    """Samples for one batch by the rule of `packing`; None puts one in each row.

    Args:
      shape: sizes of the batch; no sample may have more positions than a row, or more tiles than a
        group.
      packing: the rule.
      queue: samples that wait, first come first.
      read: the next sample; None at the end of the data.
      unplaced: told of each sample that first fit finds no room for; it may raise.
    """
    if packing is not None and packing.fit == "best":
        return _fill_rows(shape, packing.lookahead, queue, read)
    return _first_fit(shape, 1 if packing is None else packing.lookahead, queue, read, unplaced)


def _first_fit(
    shape: BatchShape,
    lookahead: int,
    queue: Sequence[S],
    read: Read[S],
    unplaced: Unplaced[S] | None,
) -> Filled[S]:
    """Each sample into the first row with room, until `lookahead` wait that have none."""
    packer, queue = FirstFit(shape), collections.deque(queue)
    placed: list[tuple[int, S]] = []
    waiting: list[S] = []
    ended = False
    while not packer.is_full and len(waiting) < lookahead and not ended:
        item = queue.popleft() if queue else read()
        if item is None:
            ended = True
            continue
        row = packer.place(item.length, item.num_views)
        if row is not None:
            placed.append((row, item))
            continue
        if unplaced is not None:
            unplaced(item, packer, placed)
        waiting.append(item)
    return Filled(placed, [*waiting, *queue], ended and not waiting and not queue)


def _fill_rows(shape: BatchShape, lookahead: int, queue: Sequence[S], read: Read[S]) -> Filled[S]:
    """Row by row: the sample that waits longest, and the best company for it among the others.

    Before each row, samples are read until `lookahead` wait. A row starts with the sample that waits
    longest among those whose tiles fit, all in a group's first row. So a sample is placed after at
    most lookahead / G batches, and mostly after lookahead / B.
    """
    per_group = shape.batch_size // shape.tile_groups
    placed, waiting, ended, free, full = [], list(queue), False, 0, True
    for row in range(shape.batch_size):
        while len(waiting) < lookahead and not ended:
            item = read()
            ended = item is None
            waiting += [] if item is None else [item]
        rows_left = per_group - row % per_group
        free = shape.tiles_per_group if rows_left == per_group else free
        sizes = [Size(each.length, each.num_views) for each in waiting]
        chosen = choose(sizes, shape, free, rows_left)
        free -= sum(sizes[i].num_views for i in chosen)
        placed += [(row, waiting[i]) for i in chosen]
        full &= (
            sum(sizes[i].length for i in chosen) == shape.seq_len
            or len(chosen) == shape.max_samples_per_row
        )
        waiting = [each for i, each in enumerate(waiting) if i not in chosen]
    return Filled(placed, waiting, ended and not waiting and not full)


def choose(sizes: Sequence[Size], shape: BatchShape, free: int, rows_left: int) -> list[int]:
    """Which samples to put in a row: the first that fits, and the best company for it.

    All sums of positions and tiles that sets of samples can reach are found exactly (subset sums, as
    bits of integers); the one taken has least positions unused, as a share of the row, plus tiles
    away from the row's even share of `free`, as a share of a row's tiles. The last row of a group
    takes all that is left, if it can. Where `max_samples_per_row` binds, there are
    sums for each number of members; above `MOST_BITS`, first without the bound, and if the set is
    too large, among the longest that a row may hold.

    Args:
      sizes: samples that wait, first come first.
      shape: sizes of the batch.
      free: tiles that the group has left.
      rows_left: rows that share them, this one included.

    Returns:
      Indices into `sizes`, ascending; [] if no sample fits.
    """
    if (first := next((i for i, s in enumerate(sizes) if s.num_views <= free), None)) is None:
        return []
    room = Size(shape.seq_len - sizes[first].length, free - sizes[first].num_views)
    fit = [each.length <= room.length and each.num_views <= room.num_views for each in sizes]
    others = [i for i in range(len(sizes)) if fit[i] and i != first]
    share = free / rows_left - sizes[first].num_views
    tiles_per_row = max(1.0, shape.tiles_per_group * shape.tile_groups / shape.batch_size)

    def unused(total: Size) -> float:
        positions = (room.length - total.length) / shape.seq_len
        return positions + abs(share - total.num_views) / tiles_per_row

    def search(among: Sequence[int], count: int) -> list[int]:
        sums = SubsetSums([sizes[i] for i in among], room, count)
        best = min(sums.fullest(), key=lambda total: (unused(total), total))
        return [among[k] for k in sums.members(best)]

    ends = itertools.accumulate(sorted(sizes[i].length for i in others))
    limit = shape.max_samples_per_row or len(sizes)
    count = limit - 1 if limit <= sum(end <= room.length for end in ends) else len(others)
    if (count + 1) * table_bits([sizes[i] for i in others], room) <= MOST_BITS:
        return sorted([first, *search(others, count)])
    found = search(others, len(others))
    if len(found) > count:
        found = search(sorted(sorted(others, key=lambda i: -sizes[i].length)[:count]), count)
    return sorted([first, *found])


class SubsetSums:
    """Sums (positions, tiles) within `room` of all sets of at most `count` of `sizes`.

    Bit `tiles * stride + positions` of an integer says whether the sum can be reached; adding a
    sample to every set at once is a shift. The stride leaves room for overlong sums, which a mask
    takes out. One integer for each sample and, where `count` binds, each number of members.
    """

    def __init__(self, sizes: Sequence[Size], room: Size, count: int):
        self._sizes, self._room = sizes, room
        # With no bound on the members there is one level, which a set never leaves.
        self._bounded = count < len(sizes)
        self._stride = 2 * room.length + 1
        valid = _valid(room.length, _max_tiles(sizes, room), self._stride)
        levels = [1] + [0] * (count if self._bounded else 0)
        self._history = [levels]
        for size in sizes:
            shift = size.num_views * self._stride + size.length
            added = [(level << shift) & valid for level in levels]
            below = [0, *added[:-1]] if self._bounded else added
            levels = [old | new for old, new in zip(levels, below, strict=True)]
            self._history.append(levels)

    def fullest(self) -> list[Size]:
        """For each number of tiles that can be reached, the sum with most positions."""
        reached = functools.reduce(int.__or__, self._history[-1])
        row = (1 << self._stride) - 1
        sums, tiles = [], 0
        while reached:
            if reached & row:
                sums.append(Size((reached & row).bit_length() - 1, tiles))
            reached, tiles = reached >> self._stride, tiles + 1
        return sums

    def members(self, total: Size) -> list[int]:
        """A set with that sum, of the earliest samples where there is a choice."""
        at = total.num_views * self._stride + total.length
        level = next(k for k, sums in enumerate(self._history[-1]) if sums >> at & 1)
        chosen = []
        for i in reversed(range(len(self._sizes))):
            if self._history[i][level] >> at & 1:
                continue
            chosen.append(i)
            at -= self._sizes[i].num_views * self._stride + self._sizes[i].length
            level -= self._bounded
        return chosen[::-1]


def _max_tiles(sizes: Sequence[Size], room: Size) -> int:
    """Bound on the tiles of a set that fits: no sample has more of them a position."""
    densest = max((s.num_views / max(1, s.length) for s in sizes), default=0.0)
    total = sum(s.num_views for s in sizes)
    return min(room.num_views, total, int(densest * room.length) + 1)


def table_bits(sizes: Sequence[Size], room: Size) -> int:
    """Bits that `SubsetSums` keeps for one number of members."""
    return (len(sizes) + 1) * (_max_tiles(sizes, room) + 1) * (2 * room.length + 1)


def _valid(positions: int, tiles: int, stride: int) -> int:
    """Bits 0..positions of each of tiles + 1 strides."""
    row = (1 << positions + 1) - 1
    bits, have = row, 1
    while have < tiles + 1:
        bits |= bits << have * stride
        have *= 2
    return bits & ((1 << (tiles + 1) * stride) - 1)
