"""Where each view's tokens stand in the sequence: the one source of every token count.

Collator, packer, model, exporter and runner all read an `ImageLayout`; none of them computes a
number of tokens by itself, so "image features and image tokens do not match" cannot happen.

A view is a map of side x side tokens after the downsampler. Image token number
`view * side**2 + row * side + col` is that map's entry; views are in `patching.make_views` order.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from bluelm_jax import config
from bluelm_jax.aspect_ratio import choose_grid
from bluelm_jax.schemes import Grid, Layout, Plain, SliceTags, Tiling, UnpadNewline

TEXT = -1
NEWLINE = -2


@dataclasses.dataclass(frozen=True, eq=False)
class ImageLayout:
    """The tokens of one image, in sequence order.

    Attributes:
      num_views: views of the image, V.
      side: tokens along one side of a view.
      index: int32 [n]. >= 0 is a flat image token, `TEXT` an ordinary vocabulary token, `NEWLINE`
        the learned newline vector. Where a map was resized, the nearest of the four corners.
      text: the vocabulary tokens' strings, one per `TEXT` entry, in order.
      corner_index: None, or int32 [n, 4]: the flat image tokens whose weighted sum stands here.
      corner_weights: None, or float32 [n, 4]; a row of an image token sums to 1, others are 0.
    """

    num_views: int
    side: int
    index: np.ndarray
    text: tuple[str, ...] = ()
    corner_index: np.ndarray | None = None
    corner_weights: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        """Sequence positions that the image takes, n."""
        return len(self.index)


def view_side(tile_size: int, patch_size: int = 14, downsample: int = 2) -> int:
    """Tokens along one side of a view: whole patches, then blocks, the last one zero-padded.

    384 pixels in patches of 14 are 27, in blocks of 2 they are 14 (BlueLM-V-3B, sec. 3.3).

    Raises:
      ValueError: `tile_size` holds no whole patch, or a size is below 1.
    """
    if patch_size < 1 or downsample < 1 or tile_size < patch_size:
        raise ValueError(
            f"tile_size = {tile_size}, patch_size = {patch_size}, downsample = {downsample}: "
            "must be >= 1, with at least one patch in a tile"
        )
    return -(-(tile_size // patch_size) // downsample)


def tokens_per_view(tile_size: int, patch_size: int = 14, downsample: int = 2) -> int:
    """Tokens of one view: `view_side` squared, 196 for BlueLM-V."""
    return view_side(tile_size, patch_size, downsample) ** 2


def token_side(model: config.VLMConfig) -> int:
    """Tokens along one side of a view of `model`."""
    match model.downsampler:
        case config.VilaConcat(factor=factor):
            return view_side(model.vision.tile_size, model.vision.patch_size, factor)
    raise TypeError(f"unknown downsampler {model.downsampler!r}")


def resizes(layout: Layout) -> bool:
    """Whether the layout may resize token maps, so that positions blend four tokens."""
    return isinstance(layout, UnpadNewline) and layout.anyres_max is not None


def num_views(width: int, height: int, tiling: Tiling, num_images: int = 1) -> int:
    """Views of an image: its tiles and, where it has one, its thumbnail."""
    return _num_views(choose_grid(width, height, tiling, num_images), tiling)


def _num_views(grid: Grid, tiling: Tiling) -> int:
    return grid.cols * grid.rows + tiling.has_thumbnail(grid)


def image_layout(
    width: int, height: int, tiling: Tiling, layout: Layout, side: int, num_images: int = 1
) -> ImageLayout:
    """Lays out the tokens of one image.

    Args:
      width, height: of the image, pixels, upright.
      tiling: the scheme, tile size and overrides.
      layout: `Plain`, `UnpadNewline` or `SliceTags`.
      side: tokens along one side of a view (`view_side`).
      num_images: images in the same sample (see `aspect_ratio.choose_grid`).

    Returns:
      The layout; its views are those of `patching.make_views` with the same arguments.

    Raises:
      ValueError: a size or `side` is below 1.
    """
    if side < 1:
        raise ValueError(f"side = {side}: must be >= 1")
    grid = choose_grid(width, height, tiling, num_images)
    match layout:
        case Plain():
            views = _num_views(grid, tiling)
            return ImageLayout(views, side, np.arange(views * side * side, dtype=np.int32))
        case UnpadNewline():
            return _unpad_newline(width, height, grid, tiling, layout, side)
        case SliceTags():
            return _slice_tags(grid, tiling, side)


def num_tokens(
    width: int, height: int, tiling: Tiling, layout: Layout, side: int, num_images: int = 1
) -> int:
    """`image_layout(...).num_tokens` without building the arrays; same arguments and errors."""
    if side < 1:
        raise ValueError(f"side = {side}: must be >= 1")
    grid = choose_grid(width, height, tiling, num_images)
    views = _num_views(grid, tiling)
    match layout:
        case Plain():
            return views * side * side
        case UnpadNewline():
            if views == 1:
                return side * side + 1
            kept = _kept(width, height, grid, tiling, layout, side)
            rows, cols = _resized(*kept.shape, layout, side)
            return tiling.has_thumbnail(grid) * side * side + rows * (cols + 1)
        case SliceTags():
            return views * (side * side + 2) + _line_breaks(grid, views)


class _Window(NamedTuple):
    """Rows top..bottom and columns left..right of a stitched map."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.bottom - self.top, self.right - self.left


def _kept(
    width: int, height: int, grid: Grid, tiling: Tiling, layout: UnpadNewline, side: int
) -> _Window:
    """The part of the stitched tile map that shows the image rather than padding."""
    rows, cols = grid.rows * side, grid.cols * side
    if tiling.resolved_fit == "stretch":
        return _Window(0, rows, 0, cols)
    least = 0 if layout.allow_empty else 1
    if width / height > cols / rows:
        drawn = max(int(height * (cols / width)), least)
        cut = (rows - drawn) // 2
        return _Window(cut, rows - cut, 0, cols)
    drawn = max(int(width * (rows / height)), least)
    cut = (cols - drawn) // 2
    return _Window(0, rows, cut, cols - cut)


def _resized(rows: int, cols: int, layout: UnpadNewline, side: int) -> tuple[int, int]:
    """Rows and columns of the tile map after anyres_max (unchanged where it does not apply)."""
    if layout.anyres_max is None:
        return rows, cols
    times = math.sqrt(rows * cols / (layout.anyres_max * side * side))
    if times <= 1.1:
        return rows, cols
    least = 0 if layout.allow_empty else 1
    return max(int(rows // times), least), max(int(cols // times), least)


def _unpad_newline(
    width: int, height: int, grid: Grid, tiling: Tiling, layout: UnpadNewline, side: int
) -> ImageLayout:
    views, tokens = _num_views(grid, tiling), side * side
    if views == 1:  # the original's rule for an image of one view
        index = np.append(np.arange(tokens, dtype=np.int32), np.int32(NEWLINE))
        return ImageLayout(views, side, index)
    has_thumbnail = tiling.has_thumbnail(grid)
    first = has_thumbnail and tiling.resolved_thumbnail == "first"
    window = _kept(width, height, grid, tiling, layout, side)
    tile_map = _stitch(grid, side, first * tokens)
    tile_map = tile_map[window.top : window.bottom, window.left : window.right]
    rows, cols = _resized(*window.shape, layout, side)
    begin = 0 if first else grid.cols * grid.rows * tokens
    thumbnail = np.arange(begin, begin + has_thumbnail * tokens, dtype=np.int32)
    if (rows, cols) == window.shape:
        parts = [_with_newlines(tile_map, NEWLINE).reshape(-1), thumbnail]
        return ImageLayout(views, side, np.concatenate(parts[::-1] if first else parts))
    corners, weights = _bilinear(tile_map, rows, cols)
    nearest = np.take_along_axis(corners, weights.argmax(-1)[..., None], axis=-1)[..., 0]
    index_parts = [_with_newlines(nearest, NEWLINE).reshape(-1), thumbnail]
    corner_parts = [_with_newlines(corners, 0).reshape(-1, 4), np.tile(thumbnail[:, None], 4)]
    exact = np.tile(np.array([1, 0, 0, 0], np.float32), (len(thumbnail), 1))
    weight_parts = [_with_newlines(weights, 0).reshape(-1, 4), exact]
    joined = (
        np.concatenate(parts[::-1] if first else parts)
        for parts in (index_parts, corner_parts, weight_parts)
    )
    index, corner_index, corner_weights = joined
    return ImageLayout(views, side, index, (), corner_index, corner_weights)


def _stitch(grid: Grid, side: int, begin: int) -> np.ndarray:
    """Flat image tokens of tiles laid out as on the canvas, int32 [rows * side, cols * side]."""
    tokens = np.arange(begin, begin + grid.cols * grid.rows * side * side, dtype=np.int32)
    tiles = tokens.reshape(grid.rows, grid.cols, side, side)
    return tiles.transpose(0, 2, 1, 3).reshape(grid.rows * side, grid.cols * side)


def _with_newlines(tile_map: np.ndarray, value: int) -> np.ndarray:
    """Appends one column of `value` to [rows, cols, ...]."""
    column = np.full_like(tile_map[:, :1], value, shape=(len(tile_map), 1, *tile_map.shape[2:]))
    return np.concatenate([tile_map, column], axis=1)


def _bilinear(tile_map: np.ndarray, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Corners int32 and weights float32, [rows, cols, 4] each, that resize a map bilinearly.

    Half-pixel centres, edges repeated, no smoothing when shrinking: what the original gets from
    its framework's bilinear interpolation.
    """
    y0, y1, y_weight = _interpolate(tile_map.shape[0], rows)
    x0, x1, x_weight = _interpolate(tile_map.shape[1], cols)
    corners = [tile_map[np.ix_(y, x)] for y in (y0, y1) for x in (x0, x1)]
    weights = [np.outer(y, x) for y in (1 - y_weight, y_weight) for x in (1 - x_weight, x_weight)]
    return np.stack(corners, axis=-1), np.stack(weights, axis=-1).astype(np.float32)


def _interpolate(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper neighbour of each of `new` positions among `old`, and the upper's weight."""
    position = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0)
    lower = position.astype(np.int32)
    return lower, np.minimum(lower + 1, old - 1), position - lower


def _line_breaks(grid: Grid, views: int) -> int:
    """Line breaks between rows of slices; an image of one view has no slices."""
    return grid.rows - 1 if views > 1 else 0


def _slice_tags(grid: Grid, tiling: Tiling, side: int) -> ImageLayout:
    views = _num_views(grid, tiling)
    overview = 0 if views == 1 or tiling.resolved_thumbnail == "first" else views - 1
    has_overview = views == 1 or tiling.has_thumbnail(grid)
    index, text, slices = [], [], 0
    for view in range(views):
        is_overview = has_overview and view == overview
        name = "image" if is_overview else "slice"
        if not is_overview:
            if slices and slices % grid.cols == 0:
                index.append([TEXT])
                text.append("\n")
            slices += 1
        tokens = np.arange(view * side * side, (view + 1) * side * side)
        index.extend([[TEXT], tokens, [TEXT]])
        text.extend([f"<{name}>", f"</{name}>"])
    return ImageLayout(views, side, np.concatenate(index).astype(np.int32), tuple(text))
