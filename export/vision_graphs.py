"""Graphs of the vision side (see `graphs` for how they differ from `bluelm_jax`)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from bluelm_jax import config, layers, layout, vision
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
    y = layers.activation("gelu")(linear(p, "fc1", y))
    return x + linear(p, "fc2", y)


def vit_model(p: Tree, cfg: config.VisionConfig, batch: int) -> Model:
    """`patches` [I, P, D] -> `features` [I, P, D]: the blocks and, for 'last', the final norm."""
    depth = cfg.depth - (cfg.feature == "penultimate")
    head_dim = cfg.width // cfg.num_heads
    weights: Tree = {
        "blocks": [_vit_block_weights(b, head_dim) for b in unstack(p["blocks"], depth)]
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


def fuse_patches(
    x: Float[Array, "I P D"], side: int, downsampler: config.Downsampler
) -> Float[Array, "R A"]:
    """Rows of factor^2 neighbouring features, R = I * Q: the gather of `downsample.downsample`.

    The colour-to-space shuffle is done with rank 4 by keeping (column in block, feature) as one
    contiguous axis.
    """
    match downsampler:
        case config.VilaConcat(factor=factor):
            tiles, _, width = x.shape
            x = x.reshape(tiles, side, side, width)
            pad = (0, -side % factor)
            if pad[1]:
                x = jnp.pad(x, ((0, 0), pad, pad, (0, 0)))
            out = (side + pad[1]) // factor
            x = x.reshape(tiles * out, factor, out, factor * width)
            return x.transpose(0, 2, 1, 3).reshape(tiles * out * out, factor * factor * width)
    raise TypeError(f"unknown downsampler {downsampler!r}")


def projector_model(p: Tree, cfg: config.VLMConfig, batch: int) -> Model:
    """`features` [I, P, Dv] -> `image_tokens` [I, Q, D]: downsampler and projector."""
    weights = {
        "fuse": linear_weights(p["downsampler"]["fuse"]),
        **{name: linear_weights(layer) for name, layer in p["projector"].items()},
    }
    tokens = layout.token_side(cfg) ** 2
    activation = layers.activation(cfg.projector.activation)

    def fn(w: Tree, features: Array) -> dict[str, Array]:
        x = linear(w, "fuse", fuse_patches(features, cfg.vision.side, cfg.downsampler))
        for i in range(cfg.projector.depth):
            x = linear(w, f"fc{i + 1}", activation(x) if i else x)
        return {"image_tokens": x.reshape(batch, tokens, cfg.decoder.width)}

    shape = (batch, cfg.vision.side**2, cfg.vision.width)
    inputs = {"features": struct(shape)}
    return Model("projector", weights, (Signature("projector", fn, inputs),))
