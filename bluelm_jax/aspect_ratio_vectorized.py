"""The choices of `aspect_ratio.py` over arrays of sizes, equal to it on every size.

For statistics over datasets. NumPy's float64 arithmetic rounds as Python's does; where its
logarithm might not, and where candidates tie, the scalar rule decides. Sizes are processed in
blocks that stay in the processor's cache.
"""

from __future__ import annotations

import functools

import numpy as np

from bluelm_jax.aspect_ratio import (
    choose_grid,
    descending,
    grids_by_tiles,
    shared_max_tiles,
    slice_grids,
)
from bluelm_jax.schemes import (
    Fixed,
    Grid,
    InternVL15,
    LlavaNext,
    MiniCPMV,
    Relaxed,
    Tiling,
)

_BLOCK = 16384


def choose_grids(
    widths: np.ndarray, heights: np.ndarray, tiling: Tiling, num_images: int = 1
) -> np.ndarray:
    """Chooses a grid for each size, as `aspect_ratio.choose_grid` does.

    Args:
      widths, heights: integers [N], pixels.
      tiling, num_images: as for `choose_grid`, the same for all sizes.

    Returns:
      int64 [N, 2]: columns and rows.

    Raises:
      ValueError: shapes differ, values are no integers, or a side is below 1.
    """
    widths, heights = _checked(widths, heights)
    grids = np.ones((len(widths), 2), np.int64)
    for start in range(0, len(widths), _BLOCK):
        block = slice(start, start + _BLOCK)
        grids[block] = _choose(widths[block], heights[block], tiling, num_images)
    return grids


def relaxed_by_the_letter(
    widths: np.ndarray, heights: np.ndarray, scheme: Relaxed, tile_size: int
) -> np.ndarray:
    """Algorithm 1 without the fallback, int64 [N, 2]; zeros where it chooses nothing."""
    widths, heights = _checked(widths, heights)
    grids = np.zeros((len(widths), 2), np.int64)
    for start in range(0, len(widths), _BLOCK):
        block = slice(start, start + _BLOCK)
        candidates = descending(scheme.grids)
        chosen = _relax(widths[block], heights[block], candidates, scheme, tile_size, 0)
        grids[block] = np.array([*candidates, (0, 0)])[chosen]
    return grids


def _checked(widths: np.ndarray, heights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    widths, heights = np.asarray(widths), np.asarray(heights)
    if widths.shape != heights.shape or widths.ndim != 1:
        raise ValueError(f"widths {widths.shape} and heights {heights.shape}: must be equal [N]")
    if widths.dtype.kind not in "iu" or heights.dtype.kind not in "iu":
        raise ValueError(f"dtypes {widths.dtype} and {heights.dtype}: must be integers")
    bad = np.flatnonzero((widths < 1) | (heights < 1))
    if bad.size:
        size = f"{widths[bad[0]]}x{heights[bad[0]]}"
        raise ValueError(f"image size {size} at {bad[0]}: each side must be at least 1 pixel")
    return widths.astype(np.int64), heights.astype(np.int64)


def _choose(w: np.ndarray, h: np.ndarray, tiling: Tiling, num_images: int) -> np.ndarray:
    side = tiling.tile_size
    match tiling.scheme:
        case LlavaNext(grids=grids):
            return np.array(grids)[_largest_resolution(w, h, grids, side)]
        case InternVL15() as scheme:
            return _nearest_ratio(w, h, scheme, tiling, num_images)
        case MiniCPMV() as scheme:
            return _adaptive_slices(w, h, scheme, tiling)
        case Relaxed() as scheme:
            return _relaxed(w, h, scheme, side)
        case Fixed():
            return np.ones((len(w), 2), np.int64)


def _effective(
    w: np.ndarray,
    h: np.ndarray,
    area: np.ndarray,
    grid: tuple[int, int],
    side: int,
    least_side: int = 0,
) -> tuple[np.ndarray, np.ndarray]:
    """Effective and wasted resolution on one canvas, float64 that hold exact integers."""
    canvas_width, canvas_height = grid[0] * side, grid[1] * side
    scale = np.minimum(canvas_width / w, canvas_height / h)
    effective = np.trunc(w * scale)
    drawn_height = np.trunc(np.multiply(h, scale, out=scale), out=scale)
    if least_side:
        np.maximum(effective, least_side, out=effective)
        np.maximum(drawn_height, least_side, out=drawn_height)
    effective *= drawn_height
    np.minimum(effective, area, out=effective)
    return effective, canvas_width * canvas_height - effective


def _largest_resolution(
    w: np.ndarray, h: np.ndarray, grids: tuple[tuple[int, int], ...], side: int
) -> np.ndarray:
    w, h = w.astype(np.float64), h.astype(np.float64)
    area = w * h
    best = np.zeros(len(w), np.int64)
    best_effective, least_wasted = np.zeros(len(w)), np.full(len(w), np.inf)
    for index, grid in enumerate(grids):
        effective, wasted = _effective(w, h, area, grid, side)
        better = (effective == best_effective) & (wasted < least_wasted)
        better |= effective > best_effective
        np.copyto(best, index, where=better)
        np.copyto(best_effective, effective, where=better)
        np.copyto(least_wasted, wasted, where=better)
    return best


def _nearest_ratio(
    w: np.ndarray, h: np.ndarray, scheme: InternVL15, tiling: Tiling, num_images: int
) -> np.ndarray:
    """Looks up the nearest ratio, then the largest grid of that ratio that the area allows."""
    ratios, members, areas = _ratio_table(
        scheme.min_tiles, shared_max_tiles(scheme, num_images), tiling.tile_size
    )
    nearest, tied = _nearest(ratios, w / h, tolerance=0.0)
    area = w * h
    member = sum(area > needed[nearest] for needed in areas)
    grids = members[nearest, member]
    return _settle(grids, tied, w, h, tiling, num_images)


@functools.cache
def _ratio_table(
    min_tiles: int, max_tiles: int, side: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Distinct ratios [K], their grids by size [K, M, 2], and the area each but the first needs.

    The areas, [M - 1, K], are infinite where a ratio has fewer grids.
    """
    by_ratio: dict[float, list[Grid]] = {}
    for grid in grids_by_tiles(min_tiles, max_tiles):
        by_ratio.setdefault(grid.cols / grid.rows, []).append(grid)
    ratios = sorted(by_ratio)
    most = max(map(len, by_ratio.values()))
    members = np.ones((len(ratios), most, 2), np.int64)
    areas = np.full((most, len(ratios)), np.inf)
    for k, ratio in enumerate(ratios):
        for m, grid in enumerate(by_ratio[ratio]):
            members[k, m] = grid
            areas[m, k] = 0.5 * side * side * grid.cols * grid.rows
    return np.array(ratios), members, areas[1:]


def _adaptive_slices(w: np.ndarray, h: np.ndarray, scheme: MiniCPMV, tiling: Tiling) -> np.ndarray:
    side, max_slices = tiling.tile_size, scheme.max_slices
    wanted = np.minimum(np.ceil(w * h / (side * side)), max_slices)
    log_ratio = np.log(w / h)
    levels, grids = _slice_table(max_slices)
    chosen = np.zeros(len(w), np.int64)  # the first grid is 1x1
    tied = np.zeros(len(w), bool)
    first = 1
    for count in range(2, max_slices + 1):
        log_grids = levels[count - 2]
        where = np.flatnonzero(wanted == count)
        # The last bit of this logarithm may differ from the original's, so near ties are ties.
        nearest, tied[where] = _nearest(log_grids, log_ratio[where], tolerance=1e-9)
        chosen[where] = first + nearest
        first += len(log_grids)
    return _settle(grids[chosen], tied, w, h, tiling)


@functools.cache
def _slice_table(max_slices: int) -> tuple[list[np.ndarray], np.ndarray]:
    """MiniCPM-V's candidates for 2, 3, .. slices in order of log ratio.

    Their log ratios, one array for each count, and all grids [K, 2], after one of 1x1.
    """
    levels, grids = [], [Grid(1, 1)]
    for count in range(2, max_slices + 1):
        candidates = sorted(slice_grids(count, max_slices), key=lambda candidate: candidate[1])
        levels.append(np.array([log_grid for _, log_grid in candidates]))
        grids.extend(grid for grid, _ in candidates)
    return levels, np.array(grids)


def _nearest(
    levels: np.ndarray, values: np.ndarray, tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Index of the nearest of ascending `levels` to each value; whether two are equally near."""
    if len(levels) == 1:
        return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    upper = np.searchsorted(levels[1:-1], values) + 1
    lower = upper - 1
    above, below = np.abs(levels[upper] - values), np.abs(levels[lower] - values)
    return np.where(above < below, upper, lower), np.abs(above - below) <= tolerance


def _settle(
    grids: np.ndarray,
    tied: np.ndarray,
    w: np.ndarray,
    h: np.ndarray,
    tiling: Tiling,
    num_images: int = 1,
) -> np.ndarray:
    """Lets the scalar rule, which knows the order of candidates, decide each tie.

    Ties come from few sizes that repeat (squares, 5:4), so each is decided once.
    """
    where = np.flatnonzero(tied)
    if where.size:
        sizes, inverse = np.unique(w[where] + 1j * h[where], return_inverse=True)
        decided = [
            choose_grid(int(size.real), int(size.imag), tiling, num_images) for size in sizes
        ]
        grids[where] = np.array(decided)[inverse]
    return grids


def _relaxed(w: np.ndarray, h: np.ndarray, scheme: Relaxed, side: int) -> np.ndarray:
    candidates = descending(scheme.grids)
    chosen = _relax(w, h, candidates, scheme, side, 0)
    nothing = np.flatnonzero(chosen < 0)
    if nothing.size:
        chosen[nothing] = _relax(w[nothing], h[nothing], candidates, scheme, side, 1)
    return np.array(candidates)[chosen]


def _relax(
    w: np.ndarray,
    h: np.ndarray,
    candidates: tuple[Grid, ...],
    scheme: Relaxed,
    side: int,
    least_side: int,
) -> np.ndarray:
    """Index of the candidate that Algorithm 1 chooses, -1 for none."""
    w, h = w.astype(np.float64), h.astype(np.float64)
    area = w * h
    measured = [_effective(w, h, area, grid, side, least_side) for grid in candidates]
    floor = None
    if scheme.max_total_loss is not None:
        best = np.maximum.reduce([effective for effective, _ in measured])
        floor = (1 - scheme.max_total_loss) * best
    chosen = np.full(len(w), -1, np.int64)
    reference, least_wasted = np.zeros(len(w)), np.full(len(w), np.inf)
    for index, (effective, wasted) in enumerate(measured):
        gain = effective - reference
        margin = scheme.alpha * reference
        update = (-gain < margin) & (wasted < least_wasted)
        update |= gain > margin
        if floor is not None:
            update &= effective >= floor
        np.copyto(chosen, index, where=update)
        np.copyto(reference, effective, where=update)
        np.copyto(least_wasted, wasted, where=update)
    return chosen
