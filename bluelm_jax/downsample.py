"""Token downsampler and projector: patch features -> tokens in the decoder's width."""

from __future__ import annotations

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from bluelm_jax import config, layers
from bluelm_jax.params import Tree


def specs(cfg: config.VLMConfig) -> Tree:
    """Weights of the downsampler: one linear layer from factor^2 fused tokens to one."""
    d = cfg.vision.width
    match cfg.downsampler:
        case config.VilaConcat(factor=factor):
            return {"fuse": layers.linear_specs(factor**2 * d, d, ("fused", "vision_embed"))}
    raise TypeError(f"unknown downsampler {cfg.downsampler!r}")


def downsample(p: Tree, x: Float[Array, "I P D"], cfg: config.VLMConfig) -> Float[Array, "I Q D"]:
    """P = side^2 features to Q = ceil(side / factor)^2, row-major in both."""
    side = cfg.vision.side
    match cfg.downsampler:
        case config.VilaConcat(factor=factor):
            x = rearrange(x, "i (h w) d -> i h w d", h=side)
            pad = (0, -side % factor)  # zeros at the end of each side: 27 -> 28
            x = jnp.pad(x, ((0, 0), pad, pad, (0, 0)))
            x = rearrange(x, "i (h a) (w b) d -> i (h w) (a b d)", a=factor, b=factor)
            return layers.linear(p["fuse"], x)
    raise TypeError(f"unknown downsampler {cfg.downsampler!r}")


def projector_specs(cfg: config.VLMConfig) -> Tree:
    """Weights of the MLP: vision width -> decoder width, then depth - 1 layers of that width."""
    widths = [cfg.vision.width] + [cfg.decoder.width] * cfg.projector.depth
    axes = ["vision_embed"] + ["embed"] * cfg.projector.depth
    return {
        # The second name of a square layer is dropped: one mesh axis cannot split both sides.
        f"fc{i + 1}": layers.linear_specs(widths[i], widths[i + 1], (axes[i], None))
        for i in range(cfg.projector.depth)
    }


def project(p: Tree, x: Float[Array, "I Q A"], cfg: config.VLMConfig) -> Float[Array, "I Q D"]:
    """The projector MLP with the activation between its layers."""
    act = layers.activation(cfg.projector.activation)
    for i in range(cfg.projector.depth):
        x = layers.linear(p[f"fc{i + 1}"], act(x) if i else x)
    return x
