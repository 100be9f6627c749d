"""(width, height) and a tiling -> the grid of tiles, as each original chooses it.

Pure Python numbers, no arrays: safe in any worker, readable beside the papers. The originals mix
exact integers with float64, and some choices hang on one truncation or one unit in the last place
(1133x567 under LLaVA-NeXT, 1050x1050 under MiniCPM-V), so the order of operations here is theirs
and must stay. `aspect_ratio_vectorized.py` holds the same rules over arrays.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from bluelm_jax.schemes import (
    Fixed,
    Grid,
    InternVL15,
    LlavaNext,
    MiniCPMV,
    Relaxed,
    Tiling,
)


def choose_grid(width: int, height: int, tiling: Tiling, num_images: int = 1) -> Grid:
    """Chooses the grid of tiles for an image.

    Args:
      width, height: of the image, pixels, upright.
      tiling: the scheme and tile size.
      num_images: images in the same sample; only InternVL 1.5 divides its tiles among them.

    Returns:
      Columns and rows. MiniCPM-V's unsliced image is Grid(1, 1).

    Raises:
      ValueError: a side or the number of images is below 1.
    """
    check_size(width, height)
    match tiling.scheme:
        case LlavaNext(grids=grids):
            return _largest_resolution(width, height, grids, tiling.tile_size)
        case InternVL15() as scheme:
            max_tiles = shared_max_tiles(scheme, num_images)
            return _nearest_ratio(width, height, scheme.min_tiles, max_tiles, tiling.tile_size)
        case MiniCPMV() as scheme:
            return _adaptive_slices(width, height, scheme.max_slices, tiling.tile_size)
        case Relaxed() as scheme:
            return _relaxed(width, height, scheme, tiling.tile_size)
        case Fixed():
            return Grid(1, 1)


def check_size(width: int, height: int) -> None:
    """Raises ValueError unless both sides are at least one pixel."""
    if width < 1 or height < 1:
        raise ValueError(f"image size {width}x{height}: each side must be at least 1 pixel")


def effective_and_wasted(
    width: int, height: int, canvas_width: int, canvas_height: int, least_side: int = 0
) -> tuple[int, int]:
    """Effective and wasted resolution of an image on a canvas, pixels (BlueLM-V-3B, sec. 3.2).

    The image is scaled to fit inside; enlarging it beyond its own pixels adds nothing. A drawn
    side counts as at least `least_side`; with 0, the rule of the papers, it can vanish.
    """
    scale = min(canvas_width / width, canvas_height / height)
    drawn = max(int(width * scale), least_side) * max(int(height * scale), least_side)
    effective = min(drawn, width * height)
    return effective, canvas_width * canvas_height - effective


def _largest_resolution(
    width: int, height: int, grids: tuple[tuple[int, int], ...], tile_size: int
) -> Grid:
    best, best_effective, least_wasted = grids[0], 0, math.inf
    for grid in grids:
        canvas_width, canvas_height = grid[0] * tile_size, grid[1] * tile_size
        effective, wasted = effective_and_wasted(width, height, canvas_width, canvas_height)
        if effective > best_effective or (effective == best_effective and wasted < least_wasted):
            best, best_effective, least_wasted = grid, effective, wasted
    return Grid(*best)


def shared_max_tiles(scheme: InternVL15, num_images: int) -> int:
    """InternVL 1.5's tile limit for one of `num_images` images, not below `scheme.min_tiles`."""
    if num_images < 1:
        raise ValueError(f"num_images = {num_images}: must be >= 1")
    return max(scheme.min_tiles, scheme.max_tiles // num_images)


@functools.cache
def grids_by_tiles(min_tiles: int, max_tiles: int) -> tuple[Grid, ...]:
    """All grids of min_tiles..max_tiles tiles by (tiles, columns).

    InternVL iterates a set, sorted only by the number of tiles; among grids of equal count this
    order makes the same choices.
    """
    grids = (
        Grid(cols, tiles // cols)
        for tiles in range(min_tiles, max_tiles + 1)
        for cols in range(1, tiles + 1)
        if tiles % cols == 0
    )
    return tuple(grids)


def _nearest_ratio(width: int, height: int, min_tiles: int, max_tiles: int, tile_size: int) -> Grid:
    ratio, area = width / height, width * height
    best, least = Grid(1, 1), math.inf
    for grid in grids_by_tiles(min_tiles, max_tiles):
        difference = abs(ratio - grid.cols / grid.rows)
        if difference < least:
            best, least = grid, difference
        elif difference == least and area > 0.5 * tile_size * tile_size * grid.cols * grid.rows:
            best = grid
    return best


@functools.cache
def slice_grids(wanted: int, max_slices: int) -> tuple[tuple[Grid, float], ...]:
    """MiniCPM-V's candidates and their log ratios where `wanted` slices would fit the area.

    One slice fewer and one more compete too, except a single slice and more than the limit.
    """
    return tuple(
        (Grid(cols, count // cols), math.log(cols / (count // cols)))
        for count in (wanted - 1, wanted, wanted + 1)
        if 1 < count <= max_slices
        for cols in range(1, count + 1)
        if count % cols == 0
    )


def _adaptive_slices(width: int, height: int, max_slices: int, tile_size: int) -> Grid:
    wanted = min(math.ceil(width * height / (tile_size * tile_size)), max_slices)
    if wanted <= 1:
        return Grid(1, 1)
    log_ratio = math.log(width / height)
    best, least = Grid(1, 1), math.inf
    for grid, log_grid in slice_grids(wanted, max_slices):
        error = abs(log_ratio - log_grid)
        if error < least:
            best, least = grid, error
    return best


@functools.cache
def descending(grids: tuple[tuple[int, int], ...]) -> tuple[Grid, ...]:
    """The order of Algorithm 1: most columns first, then most rows."""
    return tuple(sorted((Grid(*grid) for grid in grids), reverse=True))


def _relaxed(width: int, height: int, scheme: Relaxed, tile_size: int) -> Grid:
    """Algorithm 1, with a fallback where it chooses nothing.

    If every effective resolution is 0 (a side scales to less than a pixel on each canvas, as for
    1x5000) the same rule runs on sides of at least one pixel, which is what patching draws.
    """
    chosen = relaxed_by_the_letter(width, height, scheme, tile_size)
    if chosen is None:
        chosen = _relax(_measure(width, height, scheme.grids, tile_size, 1), scheme)
    assert chosen is not None  # an effective resolution of 1 or more gains over none
    return chosen


def relaxed_by_the_letter(width: int, height: int, scheme: Relaxed, tile_size: int) -> Grid | None:
    """Algorithm 1 of BlueLM-V-3B exactly; None where it chooses nothing."""
    return _relax(_measure(width, height, scheme.grids, tile_size, 0), scheme)


def _measure(
    width: int, height: int, grids: tuple[tuple[int, int], ...], tile_size: int, least_side: int
) -> list[tuple[Grid, int, int]]:
    """(grid, effective, wasted) of each candidate, descending; drawn sides >= `least_side`."""
    return [
        (
            grid,
            *effective_and_wasted(
                width, height, grid.cols * tile_size, grid.rows * tile_size, least_side
            ),
        )
        for grid in descending(grids)
    ]


def _relax(measured: Sequence[tuple[Grid, int, int]], scheme: Relaxed) -> Grid | None:
    floor = 0.0
    if scheme.max_total_loss is not None:
        floor = (1 - scheme.max_total_loss) * max(effective for _, effective, _ in measured)
    alpha = scheme.alpha
    chosen, reference, least_wasted = None, 0, math.inf
    for grid, effective, wasted in measured:
        if effective < floor:
            continue
        gains = effective - reference > alpha * reference
        close = reference - effective < alpha * reference and wasted < least_wasted
        if gains or close:
            chosen, reference, least_wasted = grid, effective, wasted
    return chosen


# Beyond this ratio of long to short side MiniCPM-V's own view sizes degenerate: it keeps each
# view's area by lengthening it without bound (1x300000 becomes 14x245378).
MAX_NATIVE_RATIO = 400


class NativeSizes(NamedTuple):
    """MiniCPM-V's own view sizes, pixels; `grid` and `slice_size` are None when unsliced."""

    overview_size: tuple[int, int]
    grid: Grid | None
    slice_size: tuple[int, int] | None


def native_sizes(width: int, height: int, tiling: Tiling) -> NativeSizes:
    """Sizes (width, height) of the views that MiniCPM-V itself makes of an image.

    Args:
      width, height: of the image, pixels, upright.
      tiling: with a `MiniCPMV` scheme.

    Raises:
      ValueError: another scheme, a side below 1, or one side above 400 times the other.
    """
    scheme = tiling.scheme
    if not isinstance(scheme, MiniCPMV):
        raise ValueError(f"{type(scheme).__name__} has no native view sizes; its views are square")
    grid = choose_grid(width, height, tiling)
    if max(width, height) > MAX_NATIVE_RATIO * min(width, height):
        raise ValueError(
            f"image size {width}x{height}: MiniCPM-V's own views need sides within a ratio of "
            f"{MAX_NATIVE_RATIO}; use square views"
        )
    side, patch = tiling.tile_size, scheme.patch_size
    if grid == (1, 1):
        return NativeSizes(_patch_size(width, height, side, patch, enlarge=True), None, None)
    overview = _patch_size(width, height, side, patch, enlarge=False)
    slice_width = _to_multiple(width, grid.cols) / grid.cols
    slice_height = _to_multiple(height, grid.rows) / grid.rows
    slice_size = _patch_size(slice_width, slice_height, side, patch, enlarge=True)
    return NativeSizes(overview, grid, slice_size)


def _to_multiple(length: int | float, unit: int) -> int:
    """`length` as a positive multiple of `unit`, rounding half to even."""
    return max(round(length / unit) * unit, unit)


def _patch_size(
    width: int | float, height: int | float, side: int, patch: int, *, enlarge: bool
) -> tuple[int, int]:
    """A size of about side^2 pixels in the same ratio, in whole patches; smaller ones may stay."""
    if enlarge or width * height > side * side:
        ratio = width / height
        height = int(side / math.sqrt(ratio))
        width = int(height * ratio)
    return _to_multiple(width, patch), _to_multiple(height, patch)
