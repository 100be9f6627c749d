"""Views whose tokens form no map: their places in layouts, samples and batches."""

import dataclasses

import numpy as np
import pytest
from data_helpers import TILING, make_config, one_example, record, take, write_dataset, write_image
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import TINY

from bluelm_jax import config, layout, layout_vectorized, schemes
from bluelm_jax.aspect_ratio_vectorized import choose_grids
from bluelm_jax.data.batching import BatchShape
from bluelm_jax.data.pipeline import Pipeline

FIVE = layout.Unordered(5)
WITHOUT_MAP = [schemes.Plain(), schemes.SliceTags()]


def test_tokens_of_every_downsampler():
    """Side 5 patches: blocks of 2 fill up to 6, blocks of 3 too."""
    found = {
        config.VilaConcat(): 3, config.PixelShuffle(factor=3): 2, config.AvgPool(factor=5): 1,
        config.Identity(): 5, config.Resampler(num_queries=5, head_dim=8): FIVE,
    }  # fmt: skip
    for downsampler, side in found.items():
        model = dataclasses.replace(TINY, downsampler=downsampler)
        assert layout.token_side(model) == side, downsampler
    assert layout.tokens_per_view(FIVE) == 5 and layout.tokens_per_view(5) == 25
    with pytest.raises(ValueError, match=r"Unordered\.count = 0: must be > 0"):
        layout.Unordered(0)


@pytest.mark.parametrize("rule", WITHOUT_MAP, ids=repr)
@settings(derandomize=True, deadline=None, max_examples=25)
@given(width=st.integers(1, 300), height=st.integers(1, 300), side=st.integers(1, 6))
def test_as_many_tokens_are_placed_as_in_a_map_of_that_size(rule, width, height, side):
    """What a layout without maps does depends on the number of tokens alone."""
    tokens = layout.Unordered(side * side)
    got = layout.image_layout(width, height, TILING, rule, tokens)
    want = layout.image_layout(width, height, TILING, rule, side)
    np.testing.assert_array_equal(got.index, want.index)
    assert got.text == want.text and got.num_views == want.num_views
    assert layout.num_tokens(width, height, TILING, rule, tokens) == got.num_tokens


@pytest.mark.parametrize("rule", WITHOUT_MAP, ids=repr)
def test_counts_over_arrays(rule):
    sizes = np.random.default_rng(0).integers(1, 400, (50, 2))
    grids = choose_grids(sizes[:, 0], sizes[:, 1], TILING)
    got = layout_vectorized.count_tokens(sizes[:, 0], sizes[:, 1], grids, TILING, rule, FIVE)
    assert got.tolist() == [layout.num_tokens(w, h, TILING, rule, FIVE) for w, h in sizes.tolist()]


def test_stitching_layouts_refuse_them():
    rule = schemes.UnpadNewline()
    sizes = np.array([40]), np.array([40]), np.array([[1, 1]])
    for refused in (
        lambda: layout.image_layout(40, 40, TILING, rule, FIVE),
        lambda: layout.num_tokens(40, 40, TILING, rule, FIVE),
        lambda: layout_vectorized.count_tokens(*sizes, TILING, rule, FIVE),
    ):
        with pytest.raises(ValueError, match="5 tokens of a resampler form no map: use Plain or"):
            refused()


def test_two_images_of_a_sample(tmp_path):
    names = [write_image(tmp_path, f"{i}.png", 30, 20, seed=i) for i in range(2)]
    sample = record("a", "<image> or <image>?", "This", image=names)
    (tmp_path / "one.json").write_text("[]")
    square = one_example(tmp_path, sample)
    path = tmp_path / "one.json"
    pipeline = Pipeline(make_config(path), side=FIVE)
    source = pipeline.config.sources[0]
    example = pipeline.maker.make(pipeline.records[0][0], source, pipeline.records[0].where(0))
    image = example.image_index[example.image_index >= 0]
    np.testing.assert_array_equal(image, np.arange(5 * example.num_views))
    assert example.num_views == square.num_views


def test_tokens_of_a_batch_stay_within_their_tiles(tmp_path):
    cfg = make_config(write_dataset(tmp_path, count=8))
    assert BatchShape.of(cfg, side=FIVE, pad_id=0).tokens_per_view == 5
    (batch,) = take(iter(Pipeline(cfg, side=FIVE)), 1)
    used = batch["image_index"][batch["image_index"] >= 0]
    tiles = batch["tiles"].shape[1]
    assert used.max() < 5 * tiles and len(np.unique(used)) == len(used)
