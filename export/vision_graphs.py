"""Graphs of the vision side (see `graphs` for how they differ from `bluelm_jax`)."""

from __future__ import annotations

from typing import assert_never

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bluelm_jax import config, downsample, layers, layout, vision
from bluelm_jax.params import Tree
from export.signatures import (
    Model,
    Signature,
    linear,
    linear_weights,
    norm_weights,
    struct,
    to_numpy,
    unstack,
)


def patch_embed_model(p: Tree, cfg: config.VisionConfig, batch: int) -> Model:
    """`tiles` uint8 [I, S, S, 3] -> `patches` [I, P, D]: pixels to [-1, 1], CONV_2D, positions."""
    weights = {
        "patch": {name: to_numpy(w) for name, w in p["patch"].items()},
        "position": to_numpy(p["position"]),
    }

    def fn(w: Tree, tiles: Array) -> dict[str, Array]:
        pixels = vision.normalize(tiles, jnp.dtype("float32"))
        return {"patches": vision.embed_patches(w, pixels, cfg)}

    side = cfg.tile_size
    inputs = {"tiles": struct((batch, side, side, 3), "uint8")}
    return Model("patch_embed", weights, (Signature("patch_embed", fn, inputs),))


def _vit_block_weights(p: Tree, head_dim: int) -> Tree:
    weights = {name: norm_weights(p[name]) for name in ("norm1", "norm2")}
    weights |= {name: linear_weights(p["attn"][name]) for name in ("k", "v", "out")}
    weights["q"] = linear_weights(p["attn"]["q"], head_dim**-0.5)
    return weights | {name: linear_weights(w) for name, w in p["mlp"].items()}


def vit_block(
    p: Tree, x: Float[Array, "R D"], tiles: int, cfg: config.VisionConfig
) -> Float[Array, "R D"]:
    """`vision.block` on a 2-D stream of R = tiles * P rows."""
    shape = (tiles, -1, cfg.num_heads, cfg.width // cfg.num_heads)
    y = layers.layer_norm(p["norm1"], x, cfg.norm_eps)
    q, k, v = (linear(p, name, y).reshape(shape).transpose(0, 2, 1, 3) for name in "qkv")
    weights = jax.nn.softmax(jnp.einsum("inph,inqh->inpq", q, k), axis=-1)
    y = jnp.einsum("inpq,inqh->inph", weights, v).transpose(0, 2, 1, 3)
    x = x + linear(p, "out", y.reshape(x.shape))
    y = layers.layer_norm(p["norm2"], x, cfg.norm_eps)
    y = layers.activation(cfg.activation)(linear(p, "fc1", y))
    return x + linear(p, "fc2", y)


def vit_model(p: Tree, cfg: config.VisionConfig, batch: int) -> Model:
    """`patches` [I, P, D] -> `features` [I, P, D]: the blocks and, for 'last', the final norm."""
    head_dim = cfg.width // cfg.num_heads
    weights: Tree = {
        "blocks": [_vit_block_weights(b, head_dim) for b in unstack(p["blocks"], cfg.num_blocks)]
    }
    if cfg.feature == "last":
        weights["norm"] = norm_weights(p["norm"])

    def fn(w: Tree, patches: Array) -> dict[str, Array]:
        x = patches.reshape(-1, cfg.width)
        for i, block in enumerate(w["blocks"]):
            with jax.named_scope(f"block_{i}"):
                x = vit_block(block, x, batch, cfg)
        if "norm" in w:
            x = layers.layer_norm(w["norm"], x, cfg.norm_eps)
        return {"features": x.reshape(patches.shape)}

    inputs = {"patches": struct((batch, cfg.side**2, cfg.width))}
    return Model("vit", weights, (Signature("vit", fn, inputs),))


def concat_blocks(x: Float[Array, "I P D"], side: int, factor: int) -> Float[Array, "R A"]:
    """`downsample.concat_blocks` with R = I * Q rows.

    The colour-to-space shuffle is done with rank 4 by keeping (column in block, feature) as one
    contiguous axis.
    """
    tiles, _, width = x.shape
    x = x.reshape(tiles, side, side, width)
    pad = (0, -side % factor)
    if pad[1]:
        x = jnp.pad(x, ((0, 0), pad, pad, (0, 0)))
    out = (side + pad[1]) // factor
    x = x.reshape(tiles * out, factor, out, factor * width)
    return x.transpose(0, 2, 1, 3).reshape(tiles * out * out, factor * factor * width)


def downsampler_weights(p: Tree, cfg: config.VLMConfig) -> Tree:
    """What `downsample_rows` needs besides its input; the resampler's queries are finished here."""
    side = cfg.vision.side
    match cfg.downsampler:
        case config.VilaConcat():
            return {"fuse": linear_weights(p["fuse"])}
        case config.AvgPool(factor=factor):
            return {"shares": downsample.block_shares(side, factor).astype(np.float32)}
        case config.Resampler():
            return _resampler_weights(p, side, cfg.downsampler)
        case config.PixelShuffle() | config.Identity():
            return {}
        case unknown:
            assert_never(unknown)


def downsample_rows(
    w: Tree, x: Float[Array, "I P D"], cfg: config.VLMConfig
) -> Float[Array, "R A"]:
    """`downsample.downsample` with its R = I * Q tokens as rows."""
    side = cfg.vision.side
    match cfg.downsampler:
        case config.VilaConcat(factor=factor):
            return linear(w, "fuse", concat_blocks(x, side, factor))
        case config.PixelShuffle(factor=factor):
            return concat_blocks(x, side, factor)
        case config.AvgPool(factor=factor):
            blocks = concat_blocks(x, side, factor).reshape(-1, factor * factor, x.shape[-1])
            means = blocks.sum(axis=1).reshape(len(x), -1, x.shape[-1]) * w["shares"][None]
            return means.reshape(-1, x.shape[-1])
        case config.Resampler():
            return _resample(w, x, cfg.downsampler)
        case config.Identity():
            return x.reshape(-1, x.shape[-1])
        case unknown:
            assert_never(unknown)


def _resampler_weights(p: Tree, side: int, cfg: config.Resampler) -> Tree:
    """The queries do not depend on the image: normed, projected and scaled, heads first."""
    normed = layers.layer_norm(p["norm_q"], p["query"], cfg.norm_eps)
    queries = layers.linear(p["attn"]["q"], normed) * cfg.head_dim**-0.5
    heads = queries.reshape(cfg.num_queries, -1, cfg.head_dim).transpose(1, 0, 2)
    return {
        "queries": to_numpy(heads),
        "positions": downsample.grid_positions(side, queries.shape[-1]),
        **{name: norm_weights(p[name]) for name in ("norm_kv", "norm_post")},
        **{name: linear_weights(p[name]) for name in ("kv", "proj")},
        **{name: linear_weights(p["attn"][name]) for name in ("k", "v", "out")},
    }


def _resample(w: Tree, x: Float[Array, "I P A"], cfg: config.Resampler) -> Float[Array, "R D"]:
    """`downsample.resample` with rank 4 at most and no broadcast product.

    The queries are the same for every tile, so one product a head scores the keys of all tiles.
    """
    tiles, patches, _ = x.shape
    rows = layers.layer_norm(
        w["norm_kv"], linear(w, "kv", x.reshape(tiles * patches, -1)), cfg.norm_eps
    )
    placed = (rows.reshape(tiles, patches, -1) + w["positions"][None]).reshape(rows.shape)
    split = (tiles * patches, -1, cfg.head_dim)
    k, v = (
        linear(w, name, y).reshape(split).transpose(1, 0, 2)
        for name, y in (("k", placed), ("v", rows))
    )
    heads = len(k)
    scores = jnp.einsum("nqh,nrh->nqr", w["queries"], k)
    scores = scores.reshape(heads, cfg.num_queries, tiles, patches)
    weights = jax.nn.softmax(scores, axis=-1).transpose(0, 2, 1, 3)
    v = v.reshape(heads, tiles, patches, cfg.head_dim)
    read = jnp.einsum("niqp,niph->niqh", weights, v).transpose(1, 2, 0, 3)
    y = linear(w, "out", read.reshape(tiles * cfg.num_queries, -1))
    return linear(w, "proj", layers.layer_norm(w["norm_post"], y, cfg.norm_eps))


def projector_model(p: Tree, cfg: config.VLMConfig, batch: int) -> Model:
    """`features` [I, P, Dv] -> `image_tokens` [I, Q, D]: downsampler and projector."""
    mlp = p.get("projector", {})
    weights = {
        "downsampler": downsampler_weights(p.get("downsampler", {}), cfg),
        **{name: linear_weights(w) for name, w in mlp.items() if name != "norm"},
    }
    if cfg.projector.norm:
        weights["norm"] = norm_weights(mlp["norm"])
    tokens = layout.tokens_per_view(layout.token_side(cfg))
    activation = layers.activation(cfg.projector.activation)

    def fn(w: Tree, features: Array) -> dict[str, Array]:
        x = downsample_rows(w["downsampler"], features, cfg)
        if "norm" in w:
            x = layers.layer_norm(w["norm"], x, cfg.projector.norm_eps)
        for i in range(cfg.projector.depth):
            x = linear(w, f"fc{i + 1}", activation(x) if i else x)
        return {"image_tokens": x.reshape(batch, tokens, cfg.decoder.width)}

    shape = (batch, cfg.vision.side**2, cfg.vision.width)
    inputs = {"features": struct(shape)}
    return Model("projector", weights, (Signature("projector", fn, inputs),))
