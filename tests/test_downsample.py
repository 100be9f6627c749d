"""Token downsampling and the projector."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, draw

from bluelm_jax import config, downsample, layers, layout, params


def model(side, factor=2, width=4, **projector):
    vision = config.VisionConfig(
        tile_size=4 * side, patch_size=4, width=width, depth=1, mlp_dim=8, num_heads=1
    )
    return dataclasses.replace(
        TINY,
        vision=vision,
        downsampler=config.VilaConcat(factor=factor),
        projector=config.ProjectorConfig(**projector),
    )


def fuse_by_loops(x, kernel, bias, side, factor):
    """Output (row, column) is a linear map of the factor x factor inputs below it, row by row."""
    out_side = -(-side // factor)
    out = np.zeros((len(x), out_side**2, kernel.shape[1]))
    for tile, row, col in np.ndindex(len(x), out_side, out_side):
        block = []
        for a in range(factor):
            for b in range(factor):
                r, c = row * factor + a, col * factor + b
                inside = r < side and c < side
                block.append(x[tile, r * side + c] if inside else np.zeros(x.shape[-1]))
        out[tile, row * out_side + col] = np.concatenate(block) @ kernel + bias
    return out


@pytest.mark.parametrize(("side", "factor"), [(4, 2), (5, 2), (3, 3), (7, 3), (4, 1), (1, 2)])
def test_blocks_against_literal_loops(side, factor):
    cfg = model(side, factor)
    p = draw(downsample.specs(cfg))
    x = np.random.default_rng(0).normal(size=(2, side**2, 4)).astype(np.float32)
    got = downsample.downsample(p, jnp.asarray(x), cfg)
    kernel, bias = np.asarray(p["fuse"]["kernel"]), np.asarray(p["fuse"]["bias"])
    np.testing.assert_allclose(got, fuse_by_loops(x, kernel, bias, side, factor), atol=1e-5)
    assert got.shape[1] == layout.token_side(cfg) ** 2


def test_siglip_729_become_196():
    vision = dataclasses.replace(config.siglip_so400m(), width=4, num_heads=1)
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


@pytest.mark.parametrize(("depth", "activation"), [(1, "gelu"), (2, "gelu"), (3, "silu")])
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
    cfg = config.bluelm_v_minicpm_2b()
    assert params.count(downsample.projector_specs(cfg)) == 1152 * 2304 + 2304 + 2304**2 + 2304
