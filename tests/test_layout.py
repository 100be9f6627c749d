"""Token places: literal small cases, independent resizing, and properties over all sizes."""

import itertools

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from bluelm_jax import layout, layout_vectorized, schemes
from bluelm_jax.aspect_ratio import choose_grid
from bluelm_jax.aspect_ratio_vectorized import choose_grids
from bluelm_jax.layout import NEWLINE, TEXT, Plain, SliceTags, UnpadNewline
from bluelm_jax.patching import placement
from bluelm_jax.schemes import (
    PRESETS,
    Fixed,
    InternVL15,
    LlavaNext,
    MiniCPMV,
    Relaxed,
    Tiling,
)

SIDE = st.integers(1, 20000)
LAYOUTS = [
    Plain(),
    SliceTags(),
    UnpadNewline(),
    UnpadNewline(anyres_max=2),
    UnpadNewline(anyres_max=9, allow_empty=True),
]
TILINGS = [*PRESETS.values(), *(schemes.controlled(t.scheme) for t in PRESETS.values())]


def tiling(grid, thumbnail="first", fit="pad", tile_size=28):
    scheme = LlavaNext(grids=(grid,))
    return Tiling(scheme=scheme, tile_size=tile_size, thumbnail=thumbnail, fit=fit)


@pytest.mark.parametrize(
    ("tile_size", "patch", "factor", "side"),
    [(384, 14, 2, 14), (384, 14, 1, 27), (336, 14, 1, 24), (56, 7, 2, 4), (448, 14, 3, 11)],
)
def test_tokens_per_view(tile_size, patch, factor, side):
    assert layout.view_side(tile_size, patch, factor) == side
    assert layout.tokens_per_view(side) == side**2


def test_paper_counts():
    """A 2:4 phone screen: 9 views, 6561 tokens, 1764 after the downsampler (sec. 3.3)."""
    relaxed = PRESETS["relaxed_384_4x4_a0.1"]
    assert layout.num_tokens(768, 1536, relaxed, Plain(), 27) == 6561
    assert layout.num_tokens(768, 1536, relaxed, Plain(), 14) == 1764


def test_llava_next_counts_small_images_as_the_original():
    """Read as (height, width), the pinpoints would give 1464."""
    assert layout.num_tokens(300, 200, PRESETS["llava_next_336_p5"], UnpadNewline(), 24) == 976


def test_plain_is_every_view_in_order():
    found = layout.image_layout(56, 28, tiling((2, 1)), Plain(), 2)
    assert (found.num_views, found.num_tokens) == (3, 12)
    assert found.index.dtype == np.int32 and found.index.tolist() == list(range(12))


def test_unpad_newline_stitches_rows():
    """Base view 0..3, then two tiles side by side as one map, a newline after each row."""
    found = layout.image_layout(56, 28, tiling((2, 1)), UnpadNewline(), 2)
    tiles = [4, 5, 8, 9, NEWLINE, 6, 7, 10, 11, NEWLINE]
    assert found.index.tolist() == [0, 1, 2, 3, *tiles]


def test_unpad_newline_with_the_thumbnail_last_and_without():
    found = layout.image_layout(56, 28, tiling((2, 1), "last"), UnpadNewline(), 2)
    tiles = [0, 1, 4, 5, NEWLINE, 2, 3, 6, 7, NEWLINE]
    assert found.index.tolist() == [*tiles, 8, 9, 10, 11]
    found = layout.image_layout(56, 28, tiling((2, 1), "none"), UnpadNewline(), 2)
    assert found.index.tolist() == tiles


def test_unpad_drops_padding_but_not_stretched_pixels():
    """An image half as high as its canvas loses a quarter of the rows on each side."""
    found = layout.image_layout(40, 20, tiling((1, 1), "first"), UnpadNewline(), 4)
    assert found.index.tolist() == [*range(16), NEWLINE]  # one view: kept whole
    two = Tiling(scheme=LlavaNext(grids=((1, 1),)), tile_size=28)
    found = layout.image_layout(40, 20, two, UnpadNewline(), 4)
    middle = [20, 21, 22, 23, NEWLINE, 24, 25, 26, 27, NEWLINE]
    assert found.index.tolist() == [*range(16), *middle]
    tall = layout.image_layout(20, 40, two, UnpadNewline(), 4)
    columns = [[17 + 4 * r, 18 + 4 * r, NEWLINE] for r in range(4)]
    assert tall.index.tolist() == [*range(16), *itertools.chain(*columns)]
    stretched = layout.image_layout(40, 20, tiling((2, 2), fit="stretch"), UnpadNewline(), 4)
    assert stretched.num_tokens == 16 + 8 * 9


def test_extreme_shapes_keep_some_tile_tokens():
    p5 = PRESETS["llava_next_336_p5"]
    original = layout.num_tokens(1000, 1, p5, UnpadNewline(allow_empty=True), 24)
    assert original == 576  # the base view alone
    found = layout.image_layout(1000, 1, p5, UnpadNewline(), 24)
    assert found.num_tokens == 576 + 2 * 73  # an even map keeps its two middle rows


def test_slice_tags():
    found = layout.image_layout(56, 56, tiling((2, 2)), SliceTags(), 1)
    words, text = [], iter(found.text)
    for index in found.index.tolist():
        words.append(next(text) if index == TEXT else str(index))
    assert "".join(words) == (
        "<image>0</image><slice>1</slice><slice>2</slice>\n<slice>3</slice><slice>4</slice>"
    )
    assert next(text, None) is None
    last = layout.image_layout(28, 56, tiling((1, 2), "last"), SliceTags(), 1)
    assert last.index[last.index >= 0].tolist() == [0, 1, 2]
    assert last.text == ("<slice>", "</slice>", "\n", "<slice>", "</slice>", "<image>", "</image>")
    alone = layout.image_layout(28, 28, PRESETS["minicpm_v_448_max9"], SliceTags(), 2)
    assert alone.text == ("<image>", "</image>")
    assert alone.index.tolist() == [TEXT, 0, 1, 2, 3, TEXT]


@pytest.mark.parametrize("grid", [(3, 2), (2, 6), (6, 6)])
@pytest.mark.parametrize("thumbnail", ["first", "last", "none"])
def test_anyres_max_equals_bilinear_resizing(grid, thumbnail):
    """Corners and weights against jax.image.resize of the stitched, unpadded map."""
    side, width, height = 5, 400, 300
    tile = tiling(grid, thumbnail)
    found = layout.image_layout(width, height, tile, UnpadNewline(anyres_max=1), side)
    plain = layout.image_layout(width, height, tile, UnpadNewline(), side)
    tokens = np.random.default_rng(0).normal(size=found.num_views * side * side)
    is_tile = np.ones(found.num_views * side * side, bool)
    if thumbnail != "none":
        start = 0 if thumbnail == "first" else grid[0] * grid[1] * side * side
        is_tile[start : start + side * side] = False
    kept = plain.index[(plain.index < 0) | is_tile[plain.index]]
    tile_map = tokens[kept.reshape(-1, np.argmax(kept < 0) + 1)[:, :-1]]
    times = np.sqrt(tile_map.size / side**2)
    assert times > 1.1
    shape = [int(length // times) for length in tile_map.shape]
    expected = jax.image.resize(tile_map, shape, "linear", antialias=False)
    assert found.corner_index is not None and found.corner_weights is not None
    values = (tokens[found.corner_index] * found.corner_weights).sum(axis=1)
    from_map = found.index[:, None] == found.corner_index
    assert np.all(from_map.any(axis=1) | (found.index == NEWLINE))
    on_map = is_tile[np.maximum(found.index, 0)] & (found.index >= 0)
    np.testing.assert_allclose(values[on_map], np.ravel(expected), atol=1e-5)
    sums = found.corner_weights.sum(axis=1)
    np.testing.assert_allclose(sums, found.index != NEWLINE, atol=1e-6)
    thumbnails = ~on_map & (found.index >= 0)
    np.testing.assert_array_equal(values[thumbnails], tokens[~is_tile])


def test_anyres_max_leaves_small_maps_alone():
    found = layout.image_layout(56, 56, tiling((2, 2)), UnpadNewline(anyres_max=4), 3)
    assert found.corner_index is None and found.num_tokens == 9 + 6 * 7


@hypothesis.given(SIDE, SIDE, st.sampled_from(TILINGS), st.sampled_from(LAYOUTS), st.integers(1, 6))
@hypothesis.settings(max_examples=300)
def test_counts_are_positive_bounded_and_agree(width, height, tile, rule, num_images):
    side = 3
    found = layout.image_layout(width, height, tile, rule, side, num_images)
    views = layout.num_views(width, height, tile, num_images)
    assert found.num_views == views
    assert found.num_tokens == layout.num_tokens(width, height, tile, rule, side, num_images)
    assert len(found.text) == np.sum(found.index == TEXT)
    image_tokens = found.index[found.index >= 0]
    grid = choose_grid(width, height, tile, num_images)
    assert 0 < len(image_tokens) <= views * side**2 and image_tokens.max() < views * side**2
    assert found.num_tokens <= views * (side**2 + 2) + 2 * grid.rows * side
    if isinstance(rule, Plain | SliceTags):
        np.testing.assert_array_equal(image_tokens, np.arange(views * side**2))
    elif not rule.allow_empty:
        tiles = found.num_tokens - side**2 * tile.has_thumbnail(grid)
        assert tiles > 1  # at least one token of the tiles, and a newline


@hypothesis.given(st.lists(st.tuples(SIDE, SIDE), min_size=1, max_size=10))
@hypothesis.settings(max_examples=12)
def test_vectorised_counts_equal_scalar(sizes):
    widths, heights = np.array(sizes).T
    for tile in TILINGS:
        grids = choose_grids(widths, heights, tile)
        views = layout_vectorized.count_views(grids, tile)
        assert views.tolist() == [layout.num_views(w, h, tile) for w, h in sizes]
        drawn = layout_vectorized.drawn_sizes(widths, heights, grids, tile)
        assert drawn.tolist() == [
            list(placement(w, h, tuple(grid), tile)[2:])
            for (w, h), grid in zip(sizes, grids.tolist(), strict=True)
        ]
        for rule in LAYOUTS:
            counts = layout_vectorized.count_tokens(widths, heights, grids, tile, rule, 27)
            scalar = [layout.num_tokens(w, h, tile, rule, 27) for w, h in sizes]
            assert counts.tolist() == scalar, rule


def test_vectorised_native_sizes_are_for_minicpm_only():
    widths = np.array([10])
    with pytest.raises(ValueError, match="Fixed has no native view sizes"):
        layout_vectorized.native_sizes(widths, widths, np.ones((1, 2), int), PRESETS["fixed_384"])


@pytest.mark.parametrize("rule", LAYOUTS, ids=repr)
def test_side_below_one_is_refused(rule):
    for count in (layout.image_layout, layout.num_tokens):
        with pytest.raises(ValueError, match="side = 0: must be >= 1"):
            count(10, 10, Tiling(scheme=Fixed()), rule, 0)


def test_no_whole_patch_is_refused():
    with pytest.raises(ValueError, match="tile_size = 13, patch_size = 14"):
        layout.view_side(13)


def test_tilings_under_test_cover_every_scheme():
    assert {type(t.scheme) for t in TILINGS} == {LlavaNext, InternVL15, MiniCPMV, Relaxed, Fixed}
