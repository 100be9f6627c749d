"""View, token and size counts of `layout.py` and `patching.py` over arrays of sizes.

For statistics over datasets; equal to the scalar forms on every size. The grids come from
`aspect_ratio_vectorized.choose_grids`, so one choice serves several counts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bluelm_jax.aspect_ratio import MAX_NATIVE_RATIO
from bluelm_jax.layout import Side, check_layout, tokens_per_view
from bluelm_jax.schemes import Layout, MiniCPMV, Plain, SliceTags, Tiling, UnpadNewline


def count_views(grids: np.ndarray, tiling: Tiling) -> np.ndarray:
    """Views of images cut by `grids` [N, 2] (columns, rows), int64 [N]."""
    tiles = grids[:, 0] * grids[:, 1]
    if tiling.resolved_thumbnail == "none":
        return tiles
    return tiles + ((tiles > 1) | tiling.resolved_single_tile_thumbnail)


def count_tokens(
    widths: np.ndarray,
    heights: np.ndarray,
    grids: np.ndarray,
    tiling: Tiling,
    layout: Layout,
    side: Side,
) -> np.ndarray:
    """Sequence positions of each image, as `layout.num_tokens` counts them.

    Args:
      widths, heights: integers [N], pixels.
      grids: [N, 2], columns and rows chosen for them.
      tiling, layout, side: as for `layout.image_layout`.

    Returns:
      int64 [N].

    Raises:
      ValueError: `side` is below 1, or the layout needs maps that `side` has not.
    """
    check_layout(layout, side)
    views, tokens = count_views(grids, tiling), tokens_per_view(side)
    match layout:
        case Plain():
            return views * tokens
        case SliceTags():
            return views * (tokens + 2) + np.where(views > 1, grids[:, 1] - 1, 0)
        case UnpadNewline():
            assert isinstance(side, int)  # By check_layout.
            rows, cols = _tile_map(widths, heights, grids, tiling, layout, side)
            thumbnails = views - grids[:, 0] * grids[:, 1]
            return np.where(views == 1, tokens + 1, thumbnails * tokens + rows * (cols + 1))


def _tile_map(
    widths: np.ndarray,
    heights: np.ndarray,
    grids: np.ndarray,
    tiling: Tiling,
    layout: UnpadNewline,
    side: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of each stitched map after unpadding and anyres_max."""
    cols, rows = grids[:, 0] * side, grids[:, 1] * side
    least = 0 if layout.allow_empty else 1
    if tiling.resolved_fit == "pad":
        wide = widths / heights > cols / rows
        drawn_rows = np.maximum((heights * (cols / widths)).astype(np.int64), least)
        drawn_cols = np.maximum((widths * (rows / heights)).astype(np.int64), least)
        rows, cols = (
            np.where(wide, rows - 2 * ((rows - drawn_rows) // 2), rows),
            np.where(wide, cols, cols - 2 * ((cols - drawn_cols) // 2)),
        )
    if layout.anyres_max is None:
        return rows, cols
    times = np.sqrt(rows * cols / (layout.anyres_max * side * side))
    shrink = times > 1.1
    times = np.where(shrink, times, 1.0)
    return (
        np.where(shrink, np.maximum((rows // times).astype(np.int64), least), rows),
        np.where(shrink, np.maximum((cols // times).astype(np.int64), least), cols),
    )


def drawn_sizes(
    widths: np.ndarray, heights: np.ndarray, grids: np.ndarray, tiling: Tiling
) -> np.ndarray:
    """Width and height of each resized image on its canvas (`patching.placement`), int64 [N, 2]."""
    canvas = grids * tiling.tile_size
    if tiling.resolved_fit == "stretch":
        return canvas
    scale_w, scale_h = canvas[:, 0] / widths, canvas[:, 1] / heights
    by_width = scale_w < scale_h
    new_w = np.minimum(np.ceil(widths * scale_h), canvas[:, 0]).astype(np.int64)
    new_h = np.minimum(np.ceil(heights * scale_w), canvas[:, 1]).astype(np.int64)
    return np.stack(
        [np.where(by_width, canvas[:, 0], new_w), np.where(by_width, new_h, canvas[:, 1])], axis=1
    )


class NativeSizeArrays(NamedTuple):
    """MiniCPM-V's own view sizes; `sliced` and `defined` are bool [N], sizes int64 [N, 2].

    Slice sizes hold no meaning where not `sliced`, and neither size where not `defined`.
    """

    overview_size: np.ndarray
    slice_size: np.ndarray
    sliced: np.ndarray
    defined: np.ndarray


def native_sizes(
    widths: np.ndarray, heights: np.ndarray, grids: np.ndarray, tiling: Tiling
) -> NativeSizeArrays:
    """`aspect_ratio.native_sizes` of each size, `defined` where that raises nothing.

    Raises:
      ValueError: the scheme is not MiniCPM-V.
    """
    scheme = tiling.scheme
    if not isinstance(scheme, MiniCPMV):
        raise ValueError(f"{type(scheme).__name__} has no native view sizes; its views are square")
    side, patch = tiling.tile_size, scheme.patch_size
    sliced = grids.prod(axis=1) > 1
    overview = _patch_sizes(widths, heights, ~sliced, side, patch)
    slice_widths = _to_multiple(widths, grids[:, 0]) / grids[:, 0]
    slice_heights = _to_multiple(heights, grids[:, 1]) / grids[:, 1]
    slices = _patch_sizes(slice_widths, slice_heights, np.array(True), side, patch)
    long, short = np.maximum(widths, heights), np.minimum(widths, heights)
    return NativeSizeArrays(overview, slices, sliced, long <= MAX_NATIVE_RATIO * short)


def _to_multiple(lengths: np.ndarray, unit: int | np.ndarray) -> np.ndarray:
    return np.maximum(np.rint(lengths / unit) * unit, unit)


def _patch_sizes(
    widths: np.ndarray, heights: np.ndarray, enlarge: np.ndarray, side: int, patch: int
) -> np.ndarray:
    rescale = enlarge | (widths * heights > side * side)
    ratio = widths / heights
    new_heights = np.trunc(side / np.sqrt(ratio))
    new_widths = np.trunc(new_heights * ratio)
    sizes = np.stack(
        [np.where(rescale, new_widths, widths), np.where(rescale, new_heights, heights)], axis=1
    )
    return _to_multiple(sizes, patch).astype(np.int64)
