"""The vision tower: what each tile and each pixel can reach, features, scan options."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, draw

from bluelm_jax import params, vision

CFG = TINY.vision
WEIGHTS = draw(vision.specs(CFG))
TILES = np.random.default_rng(0).integers(0, 256, (3, 20, 20, 3), dtype=np.uint8)


def pixels(tiles=TILES):
    return vision.normalize(jnp.asarray(tiles), jnp.float32)


def encode(cfg=CFG, p=WEIGHTS, tiles=TILES):
    return np.asarray(vision.encode(p, jnp.asarray(tiles), cfg, jnp.float32))


@pytest.fixture(scope="module")
def features():
    return encode()


def test_shapes(features):
    assert features.shape == (3, 25, 24) and np.isfinite(features).all()
    assert vision.encode(WEIGHTS, jnp.asarray(TILES), CFG, jnp.bfloat16).dtype == jnp.bfloat16


def test_pixels_become_minus_one_to_one():
    ends = jnp.array([0, 255, 51], jnp.uint8).reshape(1, 1, 1, 3)
    np.testing.assert_allclose(
        vision.normalize(ends, jnp.float32)[0, 0, 0], [-1, 1, -0.6], atol=1e-6
    )


def test_tiles_are_independent_by_gradient():
    """What comes out for tile 1 depends on all of tile 1 and on nothing else."""

    def out(x):
        patches = vision.encode_patches(WEIGHTS, vision.embed_patches(WEIGHTS, x, CFG), CFG)
        return jnp.square(patches[1]).sum()

    grad = np.asarray(jax.grad(out)(pixels()))
    assert not grad[0].any() and not grad[2].any()
    assert np.abs(grad[1]).min() > 0


def test_a_tile_reads_the_same_alone_and_in_a_batch(features):
    np.testing.assert_allclose(encode(tiles=TILES[1:2])[0], features[1], atol=1e-5)


def test_patch_convolution_is_a_matrix_product():
    """Patch (row, column) in row-major order, its pixels and colours flattened, times the kernel."""
    got = vision.embed_patches(WEIGHTS, pixels(), CFG)
    kernel = np.asarray(WEIGHTS["patch"]["kernel"])
    x = np.asarray(pixels())
    for row, col in ((0, 0), (1, 3), (4, 4)):
        patch = x[:, 4 * row : 4 * row + 4, 4 * col : 4 * col + 4]
        expected = patch.reshape(3, -1) @ kernel.reshape(-1, 24) + WEIGHTS["patch"]["bias"][None]
        expected += WEIGHTS["position"][5 * row + col][None]
        np.testing.assert_allclose(got[:, 5 * row + col], expected, atol=1e-5)


def test_pixels_that_fill_no_patch_are_dropped():
    """22 pixels hold five patches of 4; the last two rows and columns reach nothing."""
    cfg = dataclasses.replace(CFG, tile_size=22)
    assert cfg.side == 5
    x = jax.random.uniform(jax.random.key(0), (1, 22, 22, 3))
    grad = jax.grad(lambda x: jnp.square(vision.embed_patches(WEIGHTS, x, cfg)).sum())(x)
    assert np.abs(grad[:, :20, :20]).min() > 0
    assert not grad[:, 20:].any() and not grad[:, :, 20:].any()
    inner = vision.embed_patches(WEIGHTS, x[:, :20, :20], CFG)
    np.testing.assert_allclose(vision.embed_patches(WEIGHTS, x, cfg), inner, atol=1e-6)


def by_hand(blocks):
    """The residual stream after the first `blocks` blocks."""
    x = vision.embed_patches(WEIGHTS, pixels(), CFG)
    for i in range(blocks):
        x = vision.block(jax.tree.map(lambda w, i=i: w[i], WEIGHTS["blocks"]), x, CFG)
    return np.asarray(x)


def test_last_feature_is_normed(features):
    stream = by_hand(2)
    assert np.abs(stream - features).max() > 0.1
    mean, var = stream.mean(-1, keepdims=True), stream.var(-1, keepdims=True)
    norm = jax.tree.map(np.asarray, WEIGHTS["norm"])
    expected = (stream - mean) / np.sqrt(var + 1e-6) * norm["scale"] + norm["bias"]
    np.testing.assert_allclose(features, expected, atol=1e-4)


def test_penultimate_feature_is_the_stream_before_the_last_block():
    """No weight is declared that the feature does not depend on."""
    cfg = dataclasses.replace(CFG, feature="penultimate")
    fewer = {
        "patch": WEIGHTS["patch"],
        "position": WEIGHTS["position"],
        "blocks": jax.tree.map(lambda w: w[:1], WEIGHTS["blocks"]),
    }
    shapes = params.map_params(lambda p: p.shape, vision.specs(cfg))
    assert jax.tree.map(jnp.shape, fewer) == shapes
    np.testing.assert_allclose(encode(cfg, fewer), by_hand(1), atol=1e-5)


def test_activation_of_the_mlps():
    """The tanh form of GELU and the erf form lie apart by up to 5e-4 in each MLP."""
    exact = dataclasses.replace(CFG, activation="gelu_exact")
    difference = np.abs(encode(exact) - encode()).max()
    assert 1e-6 < difference < 1e-2


# Positions of other tile sizes -----------------------------------------------------------------------


def test_resized_positions_are_transformers():
    """SiglipVisionEmbeddings.interpolate_pos_encoding (tests/parity/downsampler_goldens.py)."""
    with np.load(pathlib.Path(__file__).parent / "testdata" / "downsamplers.npz") as stored:
        table = stored["positions/table"]
        for side in (3, 7, 12):
            got, want = vision.resize_positions(table, side), stored[f"positions/{side}"]
            assert got.dtype == np.float32 and got.shape == (side**2, 6)
            np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max(), rtol=0)


def test_resizing_positions_keeps_what_it_should():
    rng = np.random.default_rng(0)
    table = rng.normal(size=(25, 3)).astype(np.float32)
    np.testing.assert_array_equal(vision.resize_positions(table, 5), table)
    np.testing.assert_allclose(vision.resize_positions(np.full((9, 2), 0.3), 8), 0.3, rtol=1e-12)
    # Rows stay rows: a table that grows downwards only is the same in every column.
    down = np.repeat(np.arange(4.0), 4)[:, None]
    wide = vision.resize_positions(down, 8).reshape(8, 8)
    assert (wide == wide[:, :1]).all() and (np.diff(wide[:, 0]) > 0).all()


def test_positions_that_cannot_be_resized():
    with pytest.raises(ValueError, match="table of 6 rows: must be a square map"):
        vision.resize_positions(np.ones((6, 2)), 3)
    with pytest.raises(ValueError, match="new_side = 0: must be >= 1"):
        vision.resize_positions(np.ones((4, 2)), 0)


def test_blocks_are_pre_norm_with_bidirectional_attention():
    """Scaling the stream leaves what a block adds nearly as it was; every patch reaches every one."""
    p = jax.tree.map(lambda w: w[0], WEIGHTS["blocks"])
    x = jax.random.normal(jax.random.key(1), (1, 25, 24)) * 10
    np.testing.assert_allclose(
        vision.block(p, 8 * x, CFG) - 8 * x, vision.block(p, x, CFG) - x, atol=0.3
    )
    grad = jax.grad(lambda x: vision.block(p, x, CFG)[0, 12, 0])(x)
    assert np.abs(grad[0]).max(-1).min() > 0


@pytest.mark.parametrize("option", [{"remat": True}, {"unroll": 2}])
def test_scan_options_change_neither_values_nor_gradients(option):
    def loss(p, cfg):
        return jnp.square(vision.encode(p, jnp.asarray(TILES), cfg, jnp.float32)).mean()

    other = dataclasses.replace(CFG, **option)
    value, grads = jax.value_and_grad(loss)(WEIGHTS, CFG)
    value2, grads2 = jax.value_and_grad(loss)(WEIGHTS, other)
    np.testing.assert_allclose(value2, value, rtol=1e-6)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(grads2), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_remat_is_there():
    cfg = dataclasses.replace(CFG, remat=True)
    texts = [
        str(
            jax.make_jaxpr(lambda x, c=c: vision.encode_patches(WEIGHTS, x, c))(
                jnp.ones((1, 25, 24))
            )
        )
        for c in (CFG, cfg)
    ]
    assert ["checkpoint" in text or "remat" in text for text in texts] == [False, True]


def test_no_tiles_at_all():
    assert encode(tiles=TILES[:0]).shape == (0, 25, 24)
