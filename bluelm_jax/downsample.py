"""Token downsamplers and the projector: patch features -> tokens in the decoder's width."""

from __future__ import annotations

from typing import assert_never

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Float

from bluelm_jax import config, layers
from bluelm_jax.params import Param, Tree


def specs(cfg: config.VLMConfig) -> Tree:
    """Weights of the downsampler; an empty dict for one without weights."""
    d = cfg.vision.width
    match cfg.downsampler:
        case config.VilaConcat(factor=factor):
            return {"fuse": layers.linear_specs(factor**2 * d, d, ("fused", "vision_embed"))}
        case config.Resampler():
            return _resampler_specs(cfg, cfg.downsampler)
        case config.PixelShuffle() | config.AvgPool() | config.Identity():
            return {}
        case unknown:
            assert_never(unknown)


def downsample(p: Tree, x: Float[Array, "I P D"], cfg: config.VLMConfig) -> Float[Array, "I Q A"]:
    """P = side^2 features to Q tokens of width `cfg.token_width`.

    Maps are row-major; Q is ceil(side / factor)^2, except for the resampler's queries.
    """
    side = cfg.vision.side
    match cfg.downsampler:
        case config.VilaConcat(factor=factor):
            return layers.linear(p["fuse"], concat_blocks(x, side, factor))
        case config.PixelShuffle(factor=factor):
            return concat_blocks(x, side, factor)
        case config.AvgPool(factor=factor):
            blocks = concat_blocks(x, side, factor)
            sums = rearrange(blocks, "i q (ab d) -> i q ab d", d=x.shape[-1]).sum(2)
            return sums * block_shares(side, factor)[None].astype(x.dtype)
        case config.Resampler():
            return resample(p, x, cfg.downsampler)
        case config.Identity():
            return x
        case unknown:
            assert_never(unknown)


def concat_blocks(x: Float[Array, "I P D"], side: int, factor: int) -> Float[Array, "I Q A"]:
    """Each factor x factor block of features as one vector, its rows one after the other."""
    x = rearrange(x, "i (h w) d -> i h w d", h=side)
    pad = (0, -side % factor)  # zeros at the end of each side: 27 -> 28
    x = jnp.pad(x, ((0, 0), pad, pad, (0, 0)))
    return rearrange(x, "i (h a) (w b) d -> i (h w) (a b d)", a=factor, b=factor)


def block_shares(side: int, factor: int) -> Float[np.ndarray, "Q 1"]:
    """1 / features of the map in each factor x factor block; at its end a block holds fewer."""
    inside = np.minimum(factor, side - np.arange(0, side, factor))
    return (1.0 / np.outer(inside, inside)).reshape(-1, 1)


# Resampler ---------------------------------------------------------------------------------------


def _resampler_specs(cfg: config.VLMConfig, resampler: config.Resampler) -> Tree:
    d = cfg.decoder.width

    def norm() -> Tree:
        return layers.layer_norm_specs(d, "embed")

    return {
        "query": Param((resampler.num_queries, d), (None, "embed"), 0.02, decay=False),
        "kv": layers.linear_specs(cfg.vision.width, d, ("vision_embed", None), bias=False),
        "norm_q": norm(),
        "norm_kv": norm(),
        "attn": {
            **{name: layers.linear_specs(d, d, ("embed", "heads")) for name in "qkv"},
            "out": layers.linear_specs(d, d, ("heads", "embed")),
        },
        "norm_post": norm(),
        "proj": layers.linear_specs(d, d, ("embed", None), bias=False),
    }


def resample(p: Tree, x: Float[Array, "I P A"], cfg: config.Resampler) -> Float[Array, "I Q D"]:
    """One cross-attention layer from learned queries to a tile's features (MiniCPM-V).

    Features are brought to the decoder's width and normed; 2-D positions are added to the keys, not
    to the values; queries are normed, and so is what they read, before the last linear map.
    """
    tiles, patches, _ = x.shape
    heads = (-1, p["kv"]["kernel"].shape[1] // cfg.head_dim, cfg.head_dim)
    x = layers.layer_norm(p["norm_kv"], layers.linear(p["kv"], x), cfg.norm_eps)
    queries = layers.layer_norm(p["norm_q"], p["query"].astype(x.dtype), cfg.norm_eps)
    positions = jnp.asarray(grid_positions(round(patches**0.5), x.shape[-1]), x.dtype)
    q = layers.linear(p["attn"]["q"], queries).reshape(1, *heads)
    k = layers.linear(p["attn"]["k"], x + positions[None]).reshape(tiles, *heads)
    v = layers.linear(p["attn"]["v"], x).reshape(tiles, *heads)
    read = layers.attention(jnp.broadcast_to(q, (tiles, *q.shape[1:])), k, v)
    y = layers.linear(p["attn"]["out"], read.reshape(tiles, len(queries), -1))
    return layers.linear(p["proj"], layers.layer_norm(p["norm_post"], y, cfg.norm_eps))


def grid_positions(side: int, width: int) -> Float[np.ndarray, "P D"]:
    """Fixed sine-cosine positions of a row-major side x side map.

    Half of the channels encode the column, half the row, each [sin, cos] of position *
    10000^(-i / (width / 4)), i = 0 .. width / 4 - 1 (He et al. 2022, MAE, after Vaswani et al.).

    Raises:
      ValueError: `width` is no multiple of 4.
    """
    if width % 4:
        raise ValueError(f"width = {width}: must be a multiple of 4")
    frequency = 10_000.0 ** -(np.arange(width // 4) / (width // 4))
    angle = np.arange(side)[:, None] * frequency
    line = np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    rows, columns = np.repeat(line, side, axis=0), np.tile(line, (side, 1))
    return np.concatenate([columns, rows], axis=1).astype(np.float32)


# Projector ---------------------------------------------------------------------------------------


def projector_specs(cfg: config.VLMConfig) -> Tree:
    """Weights of the MLP: token width -> decoder width, then depth - 1 layers of that width."""
    widths = [cfg.token_width] + [cfg.decoder.width] * cfg.projector.depth
    match cfg.downsampler:
        case config.PixelShuffle():
            first = "fused"
        case config.Resampler():
            first = "embed"
        case _:
            first = "vision_embed"
    # One mesh axis cannot split both sides, so one of the two names is dropped.
    axes = [(first, "embed" if first == "fused" else None)]
    axes += [("embed", None)] * (cfg.projector.depth - 1)
    tree = {
        f"fc{i + 1}": layers.linear_specs(widths[i], widths[i + 1], axes[i])
        for i in range(cfg.projector.depth)
    }
    if cfg.projector.norm:
        tree["norm"] = layers.layer_norm_specs(cfg.token_width, first)
    return tree


def project(p: Tree, x: Float[Array, "I Q A"], cfg: config.VLMConfig) -> Float[Array, "I Q D"]:
    """The norm, where there is one, and the MLP with the activation between its layers."""
    act = layers.activation(cfg.projector.activation)
    if cfg.projector.norm:
        x = layers.layer_norm(p["norm"], x, cfg.projector.norm_eps)
    for i in range(cfg.projector.depth):
        x = layers.linear(p[f"fc{i + 1}"], act(x) if i else x)
    return x
