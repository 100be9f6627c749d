"""Where each view's tokens stand in the sequence: the one source of every token count.

Collator, packer, model, exporter and runner all read an `ImageLayout`; none of them computes a
number of tokens by itself, so "image features and image tokens do not match" cannot happen.

A view is a map of side x side tokens after the downsampler, or, after a resampler, `Unordered`
tokens. Image token number `view * tokens_per_view(side) + row * side + col` is a map's entry; views
are in `patching.make_views` order.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, assert_never

import numpy as np

from bluelm_jax import config
from bluelm_jax.aspect_ratio import choose_grid
from bluelm_jax.bilinear import resize_map
from bluelm_jax.checks import check_positive
from bluelm_jax.schemes import Grid, Layout, Plain, SliceTags, Tiling, UnpadNewline

TEXT = -1
NEWLINE = -2


@dataclasses.dataclass(frozen=True)
class Unordered:
    """Tokens of a view that form no map: what learned queries read (`config.Resampler`)."""

    count: int

    def __post_init__(self):
        check_positive(self, "count")


Side = int | Unordered


@dataclasses.dataclass(frozen=True, eq=False)
class ImageLayout:
    """The tokens of one image, in sequence order.

    Attributes:
      num_views: views of the image, V.
      side: tokens along one side of a view, or `Unordered` ones.
      index: int32 [n]. >= 0 is a flat image token, `TEXT` an ordinary vocabulary token, `NEWLINE`
        the learned newline vector. Where a map was resized, the nearest of the four corners.
      text: the vocabulary tokens' strings, one per `TEXT` entry, in order.
      corner_index: None, or int32 [n, 4]: the flat image tokens whose weighted sum stands here.
      corner_weights: None, or float32 [n, 4]; a row of an image token sums to 1, others are 0.
    """

    num_views: int
    side: Side
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


def tokens_per_view(side: Side) -> int:
    """Tokens of one view, Q: 196 for BlueLM-V's side of 14."""
    return side.count if isinstance(side, Unordered) else side * side


def token_side(model: config.VLMConfig) -> Side:
    """Tokens along one side of a view of `model`, or `Unordered` ones."""
    tile_size, patch_size = model.vision.tile_size, model.vision.patch_size
    match model.downsampler:
        case config.VilaConcat(factor=factor) | config.PixelShuffle(factor=factor):
            return view_side(tile_size, patch_size, factor)
        case config.AvgPool(factor=factor):
            return view_side(tile_size, patch_size, factor)
        case config.Identity():
            return view_side(tile_size, patch_size, 1)
        case config.Resampler(num_queries=count):
            return Unordered(count)
        case unknown:
            assert_never(unknown)


def check_layout(layout: Layout, side: Side) -> None:
    """Raises ValueError unless the views of `side` can stand in `layout`."""
    if isinstance(side, Unordered) and isinstance(layout, UnpadNewline):
        raise ValueError(
            f"layout {layout} stitches the token maps of views into rows, and the {side.count} tokens "
            "of a resampler form no map: use Plain or SliceTags, or another downsampler"
        )
    if not isinstance(side, Unordered) and side < 1:
        raise ValueError(f"side = {side}: must be >= 1")


def resizes(layout: Layout) -> bool:
    """Whether the layout may resize token maps, so that positions blend four tokens."""
    return isinstance(layout, UnpadNewline) and layout.anyres_max is not None


def num_views(width: int, height: int, tiling: Tiling, num_images: int = 1) -> int:
    """Views of an image: its tiles and, where it has one, its thumbnail."""
    return _num_views(choose_grid(width, height, tiling, num_images), tiling)


def _num_views(grid: Grid, tiling: Tiling) -> int:
    return grid.cols * grid.rows + tiling.has_thumbnail(grid)


def image_layout(
    width: int, height: int, tiling: Tiling, layout: Layout, side: Side, num_images: int = 1
) -> ImageLayout:
    """Lays out the tokens of one image.

    Args:
      width, height: of the image, pixels, upright.
      tiling: the scheme, tile size and overrides.
      layout: `Plain`, `UnpadNewline` or `SliceTags`.
      side: tokens along one side of a view (`view_side`), or `Unordered` ones.
      num_images: images in the same sample (see `aspect_ratio.choose_grid`).

    Returns:
      The layout; its views are those of `patching.make_views` with the same arguments.

    Raises:
      ValueError: a size or `side` is below 1, or the layout needs maps that `side` has not.
    """
    check_layout(layout, side)
    grid = choose_grid(width, height, tiling, num_images)
    match layout:
        case Plain():
            views = _num_views(grid, tiling)
            tokens = np.arange(views * tokens_per_view(side), dtype=np.int32)
            return ImageLayout(views, side, tokens)
        case UnpadNewline():
            assert isinstance(side, int)  # By check_layout.
            return _unpad_newline(width, height, grid, tiling, layout, side)
        case SliceTags():
            return _slice_tags(grid, tiling, side)


def num_tokens(
    width: int, height: int, tiling: Tiling, layout: Layout, side: Side, num_images: int = 1
) -> int:
    """`image_layout(...).num_tokens` without building the arrays; same arguments and errors."""
    check_layout(layout, side)
    grid = choose_grid(width, height, tiling, num_images)
    views, tokens = _num_views(grid, tiling), tokens_per_view(side)
    match layout:
        case Plain():
            return views * tokens
        case UnpadNewline():
            assert isinstance(side, int)  # By check_layout.
            if views == 1:
                return tokens + 1
            kept = _kept(width, height, grid, tiling, layout, side)
            rows, cols = _resized(*kept.shape, layout, side)
            return tiling.has_thumbnail(grid) * tokens + rows * (cols + 1)
        case SliceTags():
            return views * (tokens + 2) + _line_breaks(grid, views)


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
    corners, weights = resize_map(tile_map, rows, cols)
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


def _line_breaks(grid: Grid, views: int) -> int:
    """Line breaks between rows of slices; an image of one view has no slices."""
    return grid.rows - 1 if views > 1 else 0


def _slice_tags(grid: Grid, tiling: Tiling, side: Side) -> ImageLayout:
    views, count = _num_views(grid, tiling), tokens_per_view(side)
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
        tokens = np.arange(view * count, (view + 1) * count)
        index.extend([[TEXT], tokens, [TEXT]])
        text.extend([f"<{name}>", f"</{name}>"])
    return ImageLayout(views, side, np.concatenate(index).astype(np.int32), tuple(text))
