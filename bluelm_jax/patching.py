"""An image and a tiling -> its views as uint8 pixels; no JAX, safe in workers.

Each view holds exactly the bytes that Pillow's `resize` gives, bicubic unless the tiling says
otherwise, whichever backend of
`resample` computes them: nothing is resized twice or reduced by a draft decode. Normalisation
happens on the device.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from PIL import Image

from bluelm_jax.aspect_ratio import choose_grid, native_sizes
from bluelm_jax.resample import resizer
from bluelm_jax.schemes import RGB, Grid, MiniCPMV, Tiling


class Placement(NamedTuple):
    """Where the resized image lies on its canvas, pixels from the top left."""

    left: int
    top: int
    width: int
    height: int


def placement(width: int, height: int, grid: tuple[int, int], tiling: Tiling) -> Placement:
    """Size and position of an image on the canvas of `grid` (columns, rows).

    'stretch' fills the canvas. 'pad' scales to fit inside, rounds the free side up and centres,
    the odd pixel going to the right or bottom (LLaVA-NeXT).
    """
    canvas_width, canvas_height = grid[0] * tiling.tile_size, grid[1] * tiling.tile_size
    if tiling.resolved_fit == "stretch":
        return Placement(0, 0, canvas_width, canvas_height)
    scale_width, scale_height = canvas_width / width, canvas_height / height
    # Scale first, then multiply: h * (W / w) and h * W / w round up differently.
    if scale_width < scale_height:
        new_width, new_height = canvas_width, min(math.ceil(height * scale_width), canvas_height)
    else:
        new_width, new_height = min(math.ceil(width * scale_height), canvas_width), canvas_height
    left, top = (canvas_width - new_width) // 2, (canvas_height - new_height) // 2
    return Placement(left, top, new_width, new_height)


def make_views(image: Image.Image, tiling: Tiling, num_images: int = 1) -> np.ndarray:
    """Cuts an image into its views.

    Args:
      image: upright, mode RGB (`data.images.read_image` gives it so).
      tiling: the scheme, tile size and overrides.
      num_images: images in the same sample (see `aspect_ratio.choose_grid`).

    Returns:
      uint8 [V, S, S, 3]: tiles row by row, the thumbnail (if any) first or last.

    Raises:
      ValueError: the image is not RGB, or has an empty side.
    """
    if image.mode != "RGB":
        raise ValueError(f"image mode {image.mode!r}: must be 'RGB'")
    grid = choose_grid(image.width, image.height, tiling, num_images)
    side, tiles = tiling.tile_size, grid.cols * grid.rows
    has_thumbnail = tiling.has_thumbnail(grid)
    views = np.empty((tiles + has_thumbnail, side, side, 3), np.uint8)
    start = int(has_thumbnail and tiling.resolved_thumbnail == "first")
    resize = resizer(image, tiling.resample)
    place = placement(image.width, image.height, grid, tiling)
    pixels = resize((place.width, place.height))
    _fill_tiles(views[start : start + tiles], pixels, place, grid, tiling)
    if has_thumbnail:
        views[0 if start else tiles] = resize((side, side))
    return views


def _fill_tiles(
    tiles: np.ndarray, pixels: np.ndarray, place: Placement, grid: Grid, tiling: Tiling
) -> None:
    """Draws the resized image on its canvas, writing straight into tiles [rows * cols, S, S, 3]."""
    side = tiling.tile_size
    left, top, width, height = place
    if (width, height) != (grid.cols * side, grid.rows * side):
        _fill(tiles, tiling.pad_color)
    for index, tile in enumerate(tiles):
        row, col = divmod(index, grid.cols)
        y, x = row * side - top, col * side - left  # the tile's corner in the resized image
        y0, y1 = max(y, 0), min(y + side, height)
        x0, x1 = max(x, 0), min(x + side, width)
        if y0 < y1 and x0 < x1:
            tile[y0 - y : y1 - y, x0 - x : x1 - x] = pixels[y0:y1, x0:x1]


def _fill(tiles: np.ndarray, color: RGB) -> None:
    """Sets every pixel; one byte for all is a memset, far faster than repeating three."""
    red, green, blue = color
    if red == green == blue:
        tiles.fill(red)
    else:
        tiles[:] = np.full(tiles.shape[-2:], color, np.uint8)


def make_native_views(image: Image.Image, tiling: Tiling, num_images: int = 1) -> list[np.ndarray]:
    """The views in the shapes that the original scheme gives them.

    MiniCPM-V: the overview, then the slices row by row, each uint8 [h, w, 3] with sides that are
    multiples of its patch size. Every other scheme: the square views of `make_views`.

    Raises:
      ValueError: the image is not RGB, or MiniCPM-V's views are undefined for its shape.
    """
    if not isinstance(tiling.scheme, MiniCPMV):
        return list(make_views(image, tiling, num_images))
    if image.mode != "RGB":
        raise ValueError(f"image mode {image.mode!r}: must be 'RGB'")
    overview_size, grid, slice_size = native_sizes(image.width, image.height, tiling)
    resize = resizer(image, tiling.resample)
    views = [np.array(resize(overview_size))]
    if grid is not None and slice_size is not None:
        width, height = slice_size
        refined = resize((width * grid.cols, height * grid.rows))
        blocks = refined.reshape(grid.rows, height, grid.cols, width, 3)
        views.extend(
            np.array(blocks[row, :, col]) for row in range(grid.rows) for col in range(grid.cols)
        )
    return views
