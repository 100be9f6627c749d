"""One row a size with every preset's decision, for comparison with another implementation."""

from __future__ import annotations

import csv
from collections.abc import Iterator

import numpy as np

from bluelm_jax import layout_vectorized
from bluelm_jax.aspect_ratio_vectorized import choose_grids, relaxed_by_the_letter
from bluelm_jax.schemes import PRESETS, MiniCPMV, Relaxed, Tiling, UnpadNewline
from experiments.tiling_sources import Sizes

# Layout and side of a view's token map (no downsampler) of the presets whose originals count
# tokens; `allow_empty` because they may leave an image without tile tokens.
_TOKENS = {
    "llava_next_336_p5": (UnpadNewline(allow_empty=True), 24),
    "onevision_384_6x6_max9": (UnpadNewline(anyres_max=9, allow_empty=True), 27),
}
_NO_ROW = ("fixed_384",)
_BLOCK = 65536


def write(path: str, sizes: Sizes) -> None:
    """Writes the table; 0 marks 'not sliced' or 'chooses nothing', blank 'undefined'.

    Relaxed columns follow the letter of Algorithm 1: 0 where the library takes its fallback.
    """
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["width", "height", *(name for name, _ in _columns(sizes, slice(0, 0)))])
        for start in range(0, len(sizes), _BLOCK):
            block = slice(start, start + _BLOCK)
            columns = [values.tolist() for _, values in _columns(sizes, block)]
            widths, heights = sizes.widths[block].tolist(), sizes.heights[block].tolist()
            writer.writerows(zip(widths, heights, *columns, strict=True))


def _columns(sizes: Sizes, block: slice) -> Iterator[tuple[str, np.ndarray]]:
    widths, heights = sizes.widths[block], sizes.heights[block]
    for preset, tiling in PRESETS.items():
        if preset in _NO_ROW:
            continue
        for column, values in _preset_columns(preset, widths, heights, tiling):
            yield f"{preset}.{column}", values


def _preset_columns(
    preset: str, widths: np.ndarray, heights: np.ndarray, tiling: Tiling
) -> Iterator[tuple[str, np.ndarray]]:
    if isinstance(tiling.scheme, Relaxed):
        grids = relaxed_by_the_letter(widths, heights, tiling.scheme, tiling.tile_size)
        yield from (("cols", grids[:, 0]), ("rows", grids[:, 1]))
        return
    grids = choose_grids(widths, heights, tiling)
    if isinstance(tiling.scheme, MiniCPMV):
        yield from _native_columns(widths, heights, grids, tiling)
        return
    yield from (("cols", grids[:, 0]), ("rows", grids[:, 1]))
    yield "views", layout_vectorized.count_views(grids, tiling)
    if preset in _TOKENS:
        layout, side = _TOKENS[preset]
        yield (
            "tokens",
            layout_vectorized.count_tokens(widths, heights, grids, tiling, layout, side),
        )


def _native_columns(
    widths: np.ndarray, heights: np.ndarray, grids: np.ndarray, tiling: Tiling
) -> Iterator[tuple[str, np.ndarray]]:
    native = layout_vectorized.native_sizes(widths, heights, grids, tiling)
    grids = grids * native.sliced[:, None]
    slices = native.slice_size * native.sliced[:, None]
    overview = native.overview_size
    columns = {
        "overview_w": overview[:, 0],
        "overview_h": overview[:, 1],
        "cols": grids[:, 0],
        "rows": grids[:, 1],
        "slice_w": slices[:, 0],
        "slice_h": slices[:, 1],
        "views": grids.prod(axis=1) + 1,
    }
    for name, values in columns.items():
        yield name, np.where(native.defined, values.astype(object), "")
