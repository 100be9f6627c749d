"""SigLIP vision tower: uint8 tiles -> patch features.

Shapes follow google/siglip-so400m-patch14-384: a VALID patch convolution, learned positions, pre-norm
blocks with biased projections and a tanh-GELU MLP, no class token; the pooling head is not used.
SigLIP 2 of the same size has the same shapes; it was trained on bilinearly resized pixels, SigLIP
on bicubically resized ones.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt8

from bluelm_jax import config, layers, params
from bluelm_jax.params import Param, Tree
from bluelm_jax.sharding import shard


def specs(cfg: config.VisionConfig) -> Tree:
    """Declares the tower's weights; blocks are stacked on a leading axis of size num_blocks."""
    d, m = cfg.width, cfg.mlp_dim
    residual_gain = (2 * cfg.num_blocks) ** -0.5  # keeps the stream's variance near one
    into, out = ("vision_embed", "heads"), ("heads", "vision_embed")
    block = {
        "norm1": layers.layer_norm_specs(d, "vision_embed"),
        "attn": {
            "q": layers.linear_specs(d, d, into),
            "k": layers.linear_specs(d, d, into),
            "v": layers.linear_specs(d, d, into),
            "out": layers.linear_specs(d, d, out, gain=residual_gain),
        },
        "norm2": layers.layer_norm_specs(d, "vision_embed"),
        "mlp": {
            "fc1": layers.linear_specs(d, m, ("vision_embed", "mlp")),
            "fc2": layers.linear_specs(m, d, ("mlp", "vision_embed"), gain=residual_gain),
        },
    }
    p = cfg.patch_size
    tree = {
        "patch": {
            "kernel": Param((p, p, 3, d), ("patch", "patch", "patch", "vision_embed")),
            "bias": Param((d,), ("vision_embed",), "zeros", decay=False),
        },
        "position": Param(
            (cfg.side**2, d), ("position", "vision_embed"), cfg.position_scale, decay=False
        ),
        "blocks": params.stack(block, cfg.num_blocks),
    }
    if cfg.feature == "last":
        tree["norm"] = layers.layer_norm_specs(d, "vision_embed")
    return tree


def normalize(tiles: UInt8[Array, "I S S 3"], dtype: DTypeLike) -> Float[Array, "I S S 3"]:
    """Pixels to [-1, 1]: (x / 255 - 0.5) / 0.5, as SigLIP was trained."""
    return (tiles.astype(jnp.float32) / 127.5 - 1.0).astype(dtype)


def embed_patches(
    p: Tree, pixels: Float[Array, "I S S 3"], cfg: config.VisionConfig
) -> Float[Array, "I P D"]:
    """The patch convolution (stride = kernel, VALID: remaining pixels are dropped) and positions.

    On the phone this runs on the CPU beside the NPU (sec. 3.2), hence a function of its own.
    """
    x = jax.lax.conv_general_dilated(
        pixels,
        p["patch"]["kernel"].astype(pixels.dtype),
        window_strides=(cfg.patch_size, cfg.patch_size),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    x = x.astype(jnp.float32)  # Bias and positions are added before anything is rounded again.
    x = x + layers.expand(p["patch"]["bias"].astype(x.dtype), x.ndim)
    x = x.reshape(x.shape[0], cfg.side**2, cfg.width)
    return (x + p["position"][None].astype(x.dtype)).astype(pixels.dtype)


def block(p: Tree, x: Float[Array, "I P D"], cfg: config.VisionConfig) -> Float[Array, "I P D"]:
    """One pre-norm transformer block; tokens attend to their own tile only."""
    heads = (*x.shape[:-1], cfg.num_heads, cfg.width // cfg.num_heads)
    y = layers.layer_norm(p["norm1"], x, cfg.norm_eps)
    q, k, v = (layers.linear(p["attn"][name], y).reshape(heads) for name in "qkv")
    y = layers.attention(q, k, v).reshape(x.shape)
    x = x + layers.linear(p["attn"]["out"], y)
    y = layers.layer_norm(p["norm2"], x, cfg.norm_eps)
    y = layers.activation(cfg.activation)(layers.linear(p["mlp"]["fc1"], y))
    return shard(x + layers.linear(p["mlp"]["fc2"], y), "tiles", "seq", "features")


def encode_patches(
    p: Tree, x: Float[Array, "I P D"], cfg: config.VisionConfig
) -> Float[Array, "I P D"]:
    """All blocks and, for feature = 'last', the final norm."""

    def step(x, w):
        return block(w, x, cfg), None

    step = jax.checkpoint(step) if cfg.remat else step
    x, _ = jax.lax.scan(step, x, p["blocks"], unroll=cfg.unroll)
    return x if cfg.feature == "penultimate" else layers.layer_norm(p["norm"], x, cfg.norm_eps)


def encode(
    p: Tree, tiles: UInt8[Array, "I S S 3"], cfg: config.VisionConfig, dtype: DTypeLike
) -> Float[Array, "I P D"]:
    """Tiles to patch features, all tiles as one batch (sec. 4.1, batched patch encoding)."""
    x = embed_patches(p, normalize(tiles, dtype), cfg)
    return encode_patches(p, shard(x, "tiles", "seq", "features"), cfg)


def resize_positions(table: np.ndarray, new_side: int) -> np.ndarray:
    """Position embeddings of another tile size.

    Bicubic interpolation between the old positions' centres, edges repeated, no smoothing when
    shrinking: torch's `interpolate(mode="bicubic", align_corners=False)` (Keys' kernel with
    a = -0.75), with which transformers' SigLIP reads images of other sizes.

    Args:
      table: [n * n, D], row-major over an n x n map.
      new_side: patches along one side of the new tile.

    Returns:
      [new_side * new_side, D] in the table's dtype; computed in float64.

    Raises:
      ValueError: the table's positions form no square, or `new_side` is below 1.
    """
    old_side = math.isqrt(len(table))
    if old_side**2 != len(table) or old_side == 0:
        raise ValueError(f"position table of {len(table)} rows: must be a square map")
    if new_side < 1:
        raise ValueError(f"new_side = {new_side}: must be >= 1")
    weights = _bicubic(old_side, new_side)
    maps = np.asarray(table, np.float64).reshape(old_side, old_side, -1)
    resized = np.einsum("yr,xc,rcd->yxd", weights, weights, maps, optimize=True)
    return resized.reshape(new_side**2, -1).astype(table.dtype)


def _bicubic(old: int, new: int) -> np.ndarray:
    """What each of `old` samples contributes to each of `new`, [new, old]; rows sum to 1."""
    a = -0.75
    centre = (np.arange(new) + 0.5) * (old / new) - 0.5
    first = np.floor(centre).astype(int)
    weights = np.zeros((new, old))
    for tap in range(-1, 3):
        distance = np.abs(centre - (first + tap))
        near = ((a + 2) * distance - (a + 3)) * distance**2 + 1
        far = a * (((distance - 5) * distance + 8) * distance - 4)
        taps = np.clip(first + tap, 0, old - 1)
        np.add.at(weights, (np.arange(new), taps), np.where(distance <= 1, near, far))
    return weights
