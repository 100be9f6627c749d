"""Graphs of the embedder and the decoder (see `graphs` for how they differ from `bluelm_jax`)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from bluelm_jax import config, layers
from bluelm_jax.params import Tree
from export.config import ExportConfig
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


def prefill_name(chunk: int) -> str:
    """Signature of `chunk` prompt positions."""
    return f"prefill_{chunk}"


def embedder_model(p: Tree, cfg: config.DecoderConfig, ex: ExportConfig) -> Model:
    """`token_ids` int32 [1, T] -> `embeddings` [1, T, D], for a chunk and for one token.

    A file of its own, because the NPU compiler takes no gather and the table can stay mapped.
    """
    weights: Tree = {"embed": to_numpy(p["embed"]) * np.float32(cfg.embed_scale)}
    if cfg.embed_norm:
        weights["norm"] = norm_weights(p["embed_norm"])

    def fn(w: Tree, token_ids: Int[Array, "1 T"]) -> dict[str, Array]:
        # Written as a product with one-hot rows, which the converter turns into EMBEDDING_LOOKUP,
        # the one gather that takes a quantised table.
        one_hot = jax.nn.one_hot(token_ids[0], cfg.vocab_size, dtype=jnp.float32)
        x = one_hot @ w["embed"]
        if "norm" in w:
            x = layers.layer_norm(w["norm"], x, cfg.norm_eps)
        return {"embeddings": x[None]}

    return Model(
        "embedder", weights, _two(fn, lambda t: {"token_ids": struct((1, t), "int32")}, ex)
    )


def _two(fn: Callable, inputs: Callable[[int], dict], ex: ExportConfig) -> tuple[Signature, ...]:
    return (
        Signature(prefill_name(ex.prefill_chunk), fn, inputs(ex.prefill_chunk)),
        Signature("decode", fn, inputs(1)),
    )


def _decoder_block_weights(p: Tree, cfg: config.DecoderConfig) -> Tree:
    attn, mlp, scale = p["attn"], p["mlp"], cfg.residual_scale
    return {
        "norm1": norm_weights(p["norm1"]),
        "q": linear_weights(attn["q"], cfg.head_dim**-0.5),
        "k": linear_weights(attn["k"]),
        "v": linear_weights(attn["v"]),
        "out": linear_weights(attn["out"], scale),
        "norm2": norm_weights(p["norm2"]),
        "gate": linear_weights(mlp["gate"]),
        "up": linear_weights(mlp["up"]),
        "down": linear_weights(mlp["down"], scale),
    }


def decoder_weights(p: Tree, cfg: config.DecoderConfig) -> Tree:
    """Blocks, last norm and head [V, D] of the decoder file, constants multiplied in."""
    head = to_numpy(p["embed"]) if cfg.tied_head else np.ascontiguousarray(to_numpy(p["head"]).T)
    return {
        "blocks": [_decoder_block_weights(b, cfg) for b in unstack(p["blocks"], cfg.depth)],
        "norm": norm_weights(p["norm"], 1.0 / cfg.logit_divisor),
        "head": {"weight": head},
    }


def _rope(x: Float[Array, "1 T N H"], cos: Array, sin: Array) -> Float[Array, "1 T N H"]:
    """`layers.apply_rope` with tables [1, T, 1, H]; the sine carries the sign."""
    half = x.shape[-1] // 2
    swapped = jnp.concatenate([x[..., half:], x[..., :half]], axis=-1)
    return x * cos + swapped * sin


def attend(
    q: Float[Array, "1 T N H"],
    k: Float[Array, "1 K T H"],
    v: Float[Array, "1 K H T"],
    past_k: Float[Array, "1 K C H"],
    past_v: Float[Array, "1 K H C"],
    mask: Float[Array, "1 1 T CT"],
) -> Float[Array, "T NH"]:
    """Attention over cache and new positions without joining their tensors.

    The N / K query heads of a key head are folded into rows, so nothing is repeated. The two score
    blocks are joined for one softmax and split again.
    """
    _, t, n, h = q.shape
    kv, past = k.shape[1], past_k.shape[2]
    groups = n // kv
    q = q.reshape(t, kv, groups, h).transpose(1, 2, 0, 3).reshape(1, kv, groups * t, h)
    scores = jnp.concatenate(
        [jnp.einsum("bkth,bkch->bktc", q, past_k), jnp.einsum("bkth,bkch->bktc", q, k)], axis=-1
    )
    scores = scores.reshape(kv, groups, t, past + t) + mask
    weights = jax.nn.softmax(scores, axis=-1).reshape(1, kv, groups * t, past + t)
    out = jnp.einsum("bktc,bkhc->bkth", weights[..., :past], past_v)
    out = out + jnp.einsum("bktc,bkhc->bkth", weights[..., past:], v)
    return out.reshape(kv, groups, t, h).transpose(2, 0, 1, 3).reshape(t, n * h)


def decoder_block(
    p: Tree,
    x: Float[Array, "T D"],
    rope: tuple[Array, Array],
    mask: Array,
    cache: tuple[Array, Array],
    cfg: config.DecoderConfig,
) -> tuple[Float[Array, "T D"], Float[Array, "1 K T H"], Float[Array, "1 K H T"]]:
    """One block; returns the stream and this block's new key and value slices."""
    y = layers.rms_norm(p["norm1"], x, cfg.norm_eps)
    q = _rope(linear(p, "q", y).reshape(1, -1, cfg.num_heads, cfg.head_dim), *rope)
    heads = (1, -1, cfg.num_kv_heads, cfg.head_dim)
    k = _rope(linear(p, "k", y).reshape(heads), *rope).transpose(0, 2, 1, 3)
    v = linear(p, "v", y).reshape(heads).transpose(0, 2, 3, 1)
    x = x + linear(p, "out", attend(q, k, v, *cache, mask))
    y = layers.rms_norm(p["norm2"], x, cfg.norm_eps)
    return x + linear(p, "down", jax.nn.silu(linear(p, "gate", y)) * linear(p, "up", y)), k, v


def decoder_step(
    w: Tree,
    embeddings: Float[Array, "1 T D"],
    mask: Float[Array, "1 1 T CT"],
    pos_emb_cos: Float[Array, "1 T 1 H"],
    pos_emb_sin: Float[Array, "1 T 1 H"],
    *,
    cfg: config.DecoderConfig,
    with_logits: bool,
    **cache: Array,
) -> dict[str, Array]:
    """T positions through all blocks.

    Args:
      w: `decoder_weights`.
      embeddings: decoder inputs, text and image tokens alike.
      mask: 0 where a position may attend, about -100 elsewhere; cache first, then the T new ones.
      pos_emb_cos, pos_emb_sin: `layers.rope_tables` of the positions.
      cfg: the decoder.
      with_logits: also return `logits` [1, T, V]. Without, the last block ends at its keys and
        values: nothing after them is needed to fill a cache.
      **cache: `kv_cache_k_<i>` [1, K, C, H] (after RoPE) and `kv_cache_v_<i>` [1, K, H, C].

    Returns:
      `kv_slice_k_<i>` [1, K, T, H], `kv_slice_v_<i>` [1, K, H, T] and, if asked for, `logits`.
    """
    x, outputs = embeddings[0], {}
    for i, block in enumerate(w["blocks"]):
        past = (cache[f"kv_cache_k_{i}"], cache[f"kv_cache_v_{i}"])
        with jax.named_scope(f"block_{i}"):
            x, k, v = decoder_block(block, x, (pos_emb_cos, pos_emb_sin), mask, past, cfg)
        outputs |= {f"kv_slice_k_{i}": k, f"kv_slice_v_{i}": v}
    if with_logits:
        x = layers.rms_norm(w["norm"], x, cfg.norm_eps)
        outputs["logits"] = linear(w, "head", x)[None]
    return outputs


def decoder_inputs(
    cfg: config.DecoderConfig, length: int, cache_size: int
) -> dict[str, jax.ShapeDtypeStruct]:
    """Inputs of `decoder_step` for `length` new positions and a cache of `cache_size`."""
    k, h = cfg.num_kv_heads, cfg.head_dim
    inputs = {
        "embeddings": struct((1, length, cfg.width)),
        "mask": struct((1, 1, length, cache_size + length)),
        "pos_emb_cos": struct((1, length, 1, h)),
        "pos_emb_sin": struct((1, length, 1, h)),
    }
    for i in range(cfg.depth):
        inputs[f"kv_cache_k_{i}"] = struct((1, k, cache_size, h))
        inputs[f"kv_cache_v_{i}"] = struct((1, k, h, cache_size))
    return inputs


def decoder_model(p: Tree, cfg: config.DecoderConfig, ex: ExportConfig) -> Model:
    """The decoder: `prefill_<chunk>` (fills the cache) and `decode` (one token, with logits)."""

    def signature(name: str, length: int) -> Signature:
        fn = functools.partial(decoder_step, cfg=cfg, with_logits=name == "decode")
        return Signature(name, fn, decoder_inputs(cfg, length, ex.cache_size))

    names = ((prefill_name(ex.prefill_chunk), ex.prefill_chunk), ("decode", 1))
    return Model("decoder", decoder_weights(p, cfg), tuple(signature(n, t) for n, t in names))
