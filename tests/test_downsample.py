"""Token downsampling and the projector."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import TINY, draw, make_run, replace

from bluelm_jax import config, downsample, layers, layout, params, presets, schemes, sharding, vlm

GOLDEN = pathlib.Path(__file__).parent / "testdata" / "downsamplers.npz"
ALL = {
    "vila": config.VilaConcat(),
    "shuffle": config.PixelShuffle(),
    "pool": config.AvgPool(),
    "resampler": config.Resampler(num_queries=6, head_dim=8),
    "identity": config.Identity(),
}


def model(side, factor=2, width=4, downsampler=None, **projector):
    vision = config.VisionConfig(
        tile_size=4 * side, patch_size=4, width=width, depth=1, mlp_dim=8, num_heads=1
    )
    return dataclasses.replace(
        TINY,
        vision=vision,
        downsampler=downsampler or config.VilaConcat(factor=factor),
        projector=config.ProjectorConfig(**projector),
    )


def blocks_by_loops(x, side, factor):
    """(tile, row-major block) -> its features, row by row, None where the map has ended."""
    out_side = -(-side // factor)
    for tile, row, col in np.ndindex(len(x), out_side, out_side):
        block = []
        for a in range(factor):
            for b in range(factor):
                r, c = row * factor + a, col * factor + b
                block.append(x[tile, r * side + c] if r < side and c < side else None)
        yield block


def concat_by_loops(x, side, factor):
    zeros = np.zeros(x.shape[-1])
    rows = [
        np.concatenate([zeros if f is None else f for f in block])
        for block in blocks_by_loops(x, side, factor)
    ]
    return np.stack(rows).reshape(len(x), -1, factor**2 * x.shape[-1])


def fuse_by_loops(x, kernel, bias, side, factor):
    """Output (row, column) is a linear map of the factor x factor inputs below it, row by row."""
    return concat_by_loops(x, side, factor) @ kernel + bias


SIZES = [(4, 2), (5, 2), (3, 3), (7, 3), (4, 1), (1, 2)]


@pytest.mark.parametrize(("side", "factor"), SIZES)
def test_blocks_against_literal_loops(side, factor):
    cfg = model(side, factor)
    p = draw(downsample.specs(cfg))
    x = np.random.default_rng(0).normal(size=(2, side**2, 4)).astype(np.float32)
    got = downsample.downsample(p, jnp.asarray(x), cfg)
    kernel, bias = np.asarray(p["fuse"]["kernel"]), np.asarray(p["fuse"]["bias"])
    np.testing.assert_allclose(got, fuse_by_loops(x, kernel, bias, side, factor), atol=1e-5)
    assert got.shape[1] == layout.token_side(cfg) ** 2


@settings(derandomize=True, deadline=None, max_examples=6)
@given(side=st.integers(1, 9), factor=st.integers(1, 4), width=st.integers(1, 5))
def test_shuffle_and_pool_against_literal_loops(side, factor, width):
    x = np.random.default_rng(side).normal(size=(2, side**2, width)).astype(np.float32)
    shuffle = model(side, width=width, downsampler=config.PixelShuffle(factor=factor))
    got = np.asarray(downsample.downsample({}, jnp.asarray(x), shuffle))
    np.testing.assert_array_equal(got, concat_by_loops(x, side, factor))
    assert got.shape[1] == layout.tokens_per_view(layout.token_side(shuffle))
    assert got.shape[2] == shuffle.token_width
    pool = model(side, width=width, downsampler=config.AvgPool(factor=factor))
    got = np.asarray(downsample.downsample({}, jnp.asarray(x), pool))
    blocks = blocks_by_loops(x, side, factor)
    means = [np.mean([f for f in block if f is not None], axis=0) for block in blocks]
    np.testing.assert_allclose(got, np.stack(means).reshape(got.shape), rtol=1e-5, atol=1e-6)


def test_identity_hands_every_feature_on():
    cfg = model(3, downsampler=config.Identity())
    x = jax.random.normal(jax.random.key(0), (2, 9, 4))
    assert downsample.downsample({}, x, cfg) is x and layout.token_side(cfg) == 3


# References ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored():
    """What PyTorch made of the same features and weights (tests/parity/downsampler_goldens.py)."""
    with np.load(GOLDEN) as arrays:
        return {name: arrays[name] for name in arrays.files}


def stored_linear(stored, name):
    tree = {"kernel": stored[f"{name}.weight"].T}
    return tree | ({"bias": stored[f"{name}.bias"]} if f"{name}.bias" in stored else {})


def stored_norm(stored, name):
    return {"scale": stored[f"{name}.weight"], "bias": stored[f"{name}.bias"]}


def golden_model(downsampler, **projector):
    vision = dataclasses.replace(TINY.vision, tile_size=16, width=6)
    decoder = dataclasses.replace(TINY.decoder, width=16)
    return dataclasses.replace(
        TINY, vision=vision, decoder=decoder, downsampler=downsampler,
        projector=config.ProjectorConfig(**projector),
    )  # fmt: skip


def same_shapes(tree, specs):
    shapes = params.map_params(lambda p: p.shape, specs)
    assert jax.tree.map(np.shape, tree) == shapes


def test_pixel_shuffle_and_projector_are_internvls(stored):
    cfg = golden_model(config.PixelShuffle(), activation="gelu_exact", norm=True)
    x = downsample.downsample({}, jnp.asarray(stored["features"]), cfg)
    np.testing.assert_array_equal(x, stored["shuffle"])
    p = {"norm": stored_norm(stored, "projector/layer_norm")}
    p |= {f"fc{i}": stored_linear(stored, f"projector/linear_{i}") for i in (1, 2)}
    same_shapes(p, downsample.projector_specs(cfg))
    got = downsample.project(jax.tree.map(jnp.asarray, p), x, cfg)
    scale = np.abs(stored["mlp"]).max()
    np.testing.assert_allclose(got, stored["mlp"], atol=1e-5 * scale, rtol=0)
    tanh = golden_model(config.PixelShuffle(), activation="gelu", norm=True)
    other = downsample.project(jax.tree.map(jnp.asarray, p), x, tanh)
    assert np.abs(other - stored["mlp"]).max() > 1e-5 * scale, "the two GELUs are told apart"


def test_average_pool_is_torchs(stored):
    cfg = golden_model(config.AvgPool())
    cfg = dataclasses.replace(cfg, vision=dataclasses.replace(cfg.vision, tile_size=20))
    got = downsample.downsample({}, jnp.asarray(stored["pool/features"]), cfg)
    np.testing.assert_allclose(got, stored["pool"], atol=1e-6)


def test_resampler_is_minicpm_vs(stored):
    """MiniCPM-V's q, k and v projections are stacked in one matrix of torch's attention."""
    cfg = golden_model(config.Resampler(num_queries=5, head_dim=8), depth=0)
    names = {n: stored[f"resampler/attn.in_proj_{n}"] for n in ("weight", "bias")}
    stacked = {n: np.split(w, 3) for n, w in names.items()}
    attn = {
        name: {"kernel": stacked["weight"][i].T, "bias": stacked["bias"][i]}
        for i, name in enumerate("qkv")
    }
    p = {
        "query": stored["resampler/query"],
        "kv": stored_linear(stored, "resampler/kv"),
        "attn": attn | {"out": stored_linear(stored, "resampler/attn.out_proj")},
        "proj": {"kernel": stored["resampler/proj"]},
    }
    p |= {n: stored_norm(stored, f"resampler/{n}") for n in ("norm_q", "norm_kv", "norm_post")}
    same_shapes(p, downsample.specs(cfg))
    p = jax.tree.map(jnp.asarray, p)
    got = downsample.downsample(p, jnp.asarray(stored["features"]), cfg)
    scale = np.abs(stored["resampler"]).max()
    np.testing.assert_allclose(got, stored["resampler"], atol=1e-5 * scale, rtol=0)
    assert downsample.project({}, got, cfg) is got and downsample.projector_specs(cfg) == {}


def test_grid_positions_literal():
    """Width 8: two frequencies, 1 and 1/100; columns first, sines before cosines."""
    table = downsample.grid_positions(3, 8)
    at = [np.sin(2), np.sin(0.02), np.cos(2), np.cos(0.02)]  # column 2
    at += [np.sin(1), np.sin(0.01), np.cos(1), np.cos(0.01)]  # row 1
    np.testing.assert_allclose(table[1 * 3 + 2], at, rtol=1e-6)
    with pytest.raises(ValueError, match="width = 6: must be a multiple of 4"):
        downsample.grid_positions(3, 6)


# All of them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
def test_every_one_inside_the_model(name):
    """Tokens as many and as wide as declared; every weight and every feature has a gradient."""
    cfg = dataclasses.replace(TINY, downsampler=ALL[name])
    p = draw(downsample.specs(cfg))
    x = jax.random.normal(jax.random.key(0), (2, 25, 24))
    mix = jax.random.normal(jax.random.key(1), (cfg.token_width,))

    def out(p, x):
        tokens = downsample.downsample(p, x, cfg)
        assert tokens.shape == (2, layout.tokens_per_view(layout.token_side(cfg)), len(mix))
        return jnp.square((tokens * mix[None, None]).sum(-1)).sum()

    grads, features = jax.grad(out, argnums=(0, 1))(p, x)
    assert np.abs(features).max(-1).min() > 0
    for path, g in jax.tree_util.tree_leaves_with_path(grads):
        # A constant added to every key changes no softmax.
        small = "'k'" in str(path) and "bias" in str(path)
        assert np.isfinite(g).all() and (small or np.abs(g).max() > 0), path


@pytest.mark.parametrize("name", ALL)
def test_every_one_between_tower_and_decoder(name):
    cfg = dataclasses.replace(TINY, downsampler=ALL[name])
    specs = vlm.specs(cfg)
    assert ("downsampler" in specs) == (name in ("vila", "resampler"))
    p = draw({part: specs[part] for part in specs.keys() - {"decoder"}})
    tiles = jax.ShapeDtypeStruct((3, 20, 20, 3), jnp.uint8)
    tokens = jax.eval_shape(lambda tiles: vlm.encode_tiles(p, tiles, cfg), tiles)
    side = make_run(model=cfg).token_side
    assert tokens.shape == (3, layout.tokens_per_view(side), cfg.decoder.width)


@pytest.mark.parametrize("name", ALL)
def test_every_one_splits_over_a_mesh(name):
    cfg = dataclasses.replace(TINY, downsampler=ALL[name])
    mesh = sharding.make_mesh(config.MeshConfig(data=2, fsdp=2, tensor=2))
    specs = {"downsampler": downsample.specs(cfg), "projector": downsample.projector_specs(cfg)}
    places = params.shardings(specs, mesh)
    for path, place in jax.tree_util.tree_leaves_with_path(places):
        matrix = "kernel" in str(path) or "query" in str(path)
        assert any(axis is not None for axis in place.spec) or not matrix, path


def test_a_resampler_cannot_be_stitched():
    run = make_run(model=dataclasses.replace(TINY, downsampler=ALL["resampler"], newline=True))
    with pytest.raises(ValueError, match="the 6 tokens of a resampler form no map: use Plain or"):
        replace(run, "data", layout=schemes.UnpadNewline())
    assert replace(run, "data", layout=schemes.SliceTags()).token_side == layout.Unordered(6)


def test_siglip_729_become_196():
    vision = dataclasses.replace(presets.siglip_so400m(), width=4, num_heads=1)
    cfg = dataclasses.replace(TINY, vision=vision)
    assert layout.token_side(cfg) == 14
    p = draw(downsample.specs(cfg))
    got = downsample.downsample(p, jnp.ones((1, 729, 4)), cfg)[0].reshape(14, 14, 4)
    kernel = np.asarray(p["fuse"]["kernel"]).reshape(2, 2, 4, 4)
    bias = np.asarray(p["fuse"]["bias"])
    # Of the last row only the upper half is there, of the last column the left, of the corner one.
    np.testing.assert_allclose(got[3, 5], kernel.sum((0, 1, 2)) + bias, atol=1e-5)
    np.testing.assert_allclose(got[13, 5], kernel[0].sum((0, 1)) + bias, atol=1e-5)
    np.testing.assert_allclose(got[3, 13], kernel[:, 0].sum((0, 1)) + bias, atol=1e-5)
    np.testing.assert_allclose(got[13, 13], kernel[0, 0].sum(0) + bias, atol=1e-5)


def test_fused_kernel_declares_its_fan_in():
    specs = downsample.specs(model(4, width=8))
    assert specs["fuse"]["kernel"].shape == (32, 8)
    assert specs["fuse"]["kernel"].std() == pytest.approx(32**-0.5)


def test_tiles_are_independent():
    cfg = model(5)
    p = draw(downsample.specs(cfg))
    x = jax.random.normal(jax.random.key(0), (3, 25, 4))
    grad = jax.grad(lambda x: jnp.square(downsample.downsample(p, x, cfg)[1]).sum())(x)
    assert not grad[0].any() and not grad[2].any() and np.abs(grad[1]).min() > 0


@pytest.mark.parametrize(
    ("depth", "activation"), [(1, "gelu"), (2, "gelu"), (3, "silu"), (2, "gelu_exact")]
)
def test_projector(depth, activation):
    cfg = model(4, depth=depth, activation=activation)
    p = draw(downsample.projector_specs(cfg))
    assert sorted(p) == [f"fc{i + 1}" for i in range(depth)]
    x = jax.random.normal(jax.random.key(0), (2, 4, 4))
    y = np.asarray(x)
    for i in range(depth):
        y = y if i == 0 else np.asarray(layers.activation(activation)(y))
        y = y @ np.asarray(p[f"fc{i + 1}"]["kernel"]) + np.asarray(p[f"fc{i + 1}"]["bias"])
    np.testing.assert_allclose(downsample.project(p, x, cfg), y, atol=1e-4)
    assert y.shape[-1] == cfg.decoder.width


def test_published_projector_size():
    cfg = presets.bluelm_v_minicpm_2b()
    assert params.count(downsample.projector_specs(cfg)) == 1152 * 2304 + 2304 + 2304**2 + 2304
