"""Pixels of the views, byte for byte against a canvas drawn step by step with Pillow."""

import itertools
import math

import numpy as np
import pytest
from PIL import Image

from bluelm_jax import patching, schemes
from bluelm_jax.aspect_ratio import choose_grid, native_sizes
from bluelm_jax.layout import num_views
from bluelm_jax.schemes import (
    Fixed,
    InternVL15,
    LlavaNext,
    MiniCPMV,
    Relaxed,
    Tiling,
)

SIZES = [(64, 64), (63, 65), (120, 37), (37, 121), (200, 90), (1, 1), (1, 40), (300, 3), (95, 126)]
SCHEMES = [LlavaNext(), InternVL15(), MiniCPMV(), Relaxed(), Fixed(), Fixed(fit="pad")]


def picture(width, height, seed=0):
    noise = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def draw_canvas(image, grid, tiling):
    """The canvas as the originals draw it: resize, new image, paste."""
    side = tiling.tile_size
    canvas_w, canvas_h = grid[0] * side, grid[1] * side
    if tiling.resolved_fit == "stretch":
        return image.resize((canvas_w, canvas_h), Image.Resampling.BICUBIC)
    scale_w, scale_h = canvas_w / image.width, canvas_h / image.height
    if scale_w < scale_h:
        size = canvas_w, min(math.ceil(image.height * scale_w), canvas_h)
    else:
        size = min(math.ceil(image.width * scale_h), canvas_w), canvas_h
    canvas = Image.new("RGB", (canvas_w, canvas_h), tiling.pad_color)
    resized = image.resize(size, Image.Resampling.BICUBIC)
    canvas.paste(resized, ((canvas_w - size[0]) // 2, (canvas_h - size[1]) // 2))
    return canvas


def expected_views(image, tiling):
    side, grid = tiling.tile_size, choose_grid(*image.size, tiling)
    canvas = draw_canvas(image, grid, tiling)
    views = [
        canvas.crop((col * side, row * side, (col + 1) * side, (row + 1) * side))
        for row in range(grid.rows)
        for col in range(grid.cols)
    ]
    if tiling.has_thumbnail(grid):
        thumbnail = image.resize((side, side), Image.Resampling.BICUBIC)
        views.insert(0 if tiling.resolved_thumbnail == "first" else len(views), thumbnail)
    return np.stack([np.asarray(view) for view in views])


@pytest.mark.parametrize("scheme", SCHEMES, ids=repr)
@pytest.mark.parametrize(
    "overrides",
    [{}, {"thumbnail": "last", "fit": "pad"}, {"thumbnail": "first", "fit": "stretch"}],
    ids=["own", "controlled", "stretched"],
)
def test_pixels_equal_pillow(scheme, overrides):
    tiling = Tiling(scheme=scheme, tile_size=28, pad_color=(10, 20, 30), **overrides)
    for size in SIZES:
        image = picture(*size)
        views = patching.make_views(image, tiling)
        assert views.dtype == np.uint8 and len(views) == num_views(*size, tiling)
        np.testing.assert_array_equal(views, expected_views(image, tiling), err_msg=str(size))


@pytest.mark.parametrize("size", [(950, 1256), (394, 390), (640, 427)])
def test_pixels_at_full_size(size):
    image = picture(*size)
    for name in ("llava_next_384_3x3", "internvl_448_max6"):
        tiling = schemes.PRESETS[name]
        np.testing.assert_array_equal(
            patching.make_views(image, tiling), expected_views(image, tiling)
        )


@pytest.mark.parametrize(
    ("size", "grid", "expected"),
    [
        ((950, 1256), (2, 2), (93, 0, 581, 768)),  # 187 columns of padding: 93 left, 94 right
        ((1256, 950), (2, 2), (0, 93, 768, 581)),
        ((384, 384), (1, 1), (0, 0, 384, 384)),
        ((1000, 1), (3, 1), (0, 191, 1152, 2)),  # ceil(1.152), where truncation keeps one row
        ((20000, 1), (1, 1), (0, 191, 384, 1)),  # never less than a pixel
    ],
)
def test_placement(size, grid, expected):
    assert patching.placement(*size, grid, Tiling(scheme=LlavaNext())) == expected


def test_placement_stretch_fills_the_canvas():
    tiling = Tiling(scheme=InternVL15())
    assert patching.placement(950, 1256, (2, 3), tiling) == (0, 0, 768, 1152)


def test_tiles_are_row_major():
    """Each quarter has its colour, so order, transposition and place of the thumbnail show."""
    colours = [[(250, 0, 0), (0, 250, 0)], [(0, 0, 250), (250, 250, 0)]]
    pixels = np.repeat(np.repeat(np.array(colours, np.uint8), 28, axis=0), 28, axis=1)
    tiling = Tiling(scheme=LlavaNext(grids=((2, 2),)), tile_size=28)
    views = patching.make_views(Image.fromarray(pixels), tiling)
    assert len(views) == 5
    for view, colour in zip(views[1:], itertools.chain(*colours), strict=True):
        assert (view == colour).all()
    assert len(np.unique(views[0].reshape(-1, 3), axis=0)) > 4  # the whole image, smoothed


def test_several_images_share_internvl_tiles():
    tiling = Tiling(scheme=InternVL15(max_tiles=4), tile_size=28)
    image = picture(120, 120)
    assert len(patching.make_views(image, tiling)) == 5
    assert len(patching.make_views(image, tiling, num_images=4)) == 1


def test_native_views_of_minicpm():
    tiling = Tiling(scheme=MiniCPMV(), tile_size=112)
    image = picture(400, 150)
    native = native_sizes(400, 150, tiling)
    views = patching.make_native_views(image, tiling)
    assert native.grid is not None and len(views) == native.grid.cols * native.grid.rows + 1
    overview = image.resize(native.overview_size, Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(views[0], np.asarray(overview))
    width, height = native.slice_size
    refined = image.resize((width * native.grid.cols, height * native.grid.rows))
    for number, view in enumerate(views[1:]):
        row, col = divmod(number, native.grid.cols)
        box = (col * width, row * height, (col + 1) * width, (row + 1) * height)
        np.testing.assert_array_equal(view, np.asarray(refined.crop(box)))
    assert all(side % 14 == 0 for view in views for side in view.shape[:2])


def test_native_views_unsliced_and_of_other_schemes():
    small = patching.make_native_views(picture(50, 60), schemes.PRESETS["minicpm_v_448_max9"])
    assert [view.shape for view in small] == [(490, 406, 3)]
    tiling = Tiling(scheme=Relaxed(), tile_size=28)
    views = patching.make_native_views(picture(50, 60), tiling)
    np.testing.assert_array_equal(views, patching.make_views(picture(50, 60), tiling))


@pytest.mark.parametrize("scheme", [LlavaNext(), MiniCPMV()], ids=repr)
def test_only_rgb_is_taken(scheme):
    image = Image.new("RGBA", (30, 30))
    for make in (patching.make_views, patching.make_native_views):
        with pytest.raises(ValueError, match="image mode 'RGBA': must be 'RGB'"):
            make(image, Tiling(scheme=scheme, tile_size=28))


@pytest.mark.parametrize("size", [(120, 37), (64, 64), (30, 95)])
def test_bilinear_views(size):
    """SigLIP 2's filter: every view, thumbnails included, is what Pillow's BILINEAR gives."""
    image = picture(*size)
    fixed = Tiling(scheme=Fixed(), tile_size=28, resample="bilinear")
    (view,) = patching.make_views(image, fixed)
    np.testing.assert_array_equal(view, image.resize((28, 28), Image.Resampling.BILINEAR))
    tiled = Tiling(scheme=Relaxed(), tile_size=28, resample="bilinear")
    views = patching.make_views(image, tiled)
    np.testing.assert_array_equal(views[0], view)
    with pytest.raises(ValueError, match=r"Tiling\.resample = 'nearest': must be 'bicubic' or"):
        Tiling(scheme=Fixed(), resample="nearest")
