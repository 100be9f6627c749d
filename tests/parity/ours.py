"""Our side: the library's own functions on weights that its importer read."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from bluelm_jax import batch, config, decoder, downsample, layers, params, vision, vlm
from bluelm_jax import generate as generation
from bluelm_jax.params import Tree
from bluelm_jax.weights import convert, hf_config
from tests.parity import cases
from tests.parity.cases import Case

Arrays = dict[str, np.ndarray]


def tensors(facts: dict, seed: int, dtype: DTypeLike = jnp.float32) -> dict[str, np.ndarray]:
    """The weights that the reference had, float32, after rounding to `dtype`."""
    drawn = {name: cases.draw(name, tuple(s), seed) for name, s in facts["shapes"].items()}
    return {
        name: np.asarray(jnp.asarray(x, dtype).astype(jnp.float32)) for name, x in drawn.items()
    }


def one_block(p: Tree, i: int, stacked: bool = True) -> Tree:
    """The weights of block i, still stacked or not."""
    pick = slice(i, i + 1) if stacked else i
    return jax.tree.map(lambda w: w[pick], p["blocks"])


# Compiled once a shape, for all layers and seeds.
_patches = jax.jit(vision.embed_patches, static_argnames="cfg")
_vision_block = jax.jit(vision.block, static_argnames="cfg")
_encode = jax.jit(vision.encode, static_argnames=("cfg", "dtype"))
_forward = jax.jit(decoder.forward, static_argnames="cfg")
_extend = jax.jit(decoder.extend, static_argnames="cfg")
_prefill = jax.jit(generation.prefill, static_argnames=("cfg", "chunk"))
_logits = jax.jit(decoder.logits, static_argnames="cfg")
_embed = jax.jit(decoder.embed_tokens, static_argnames=("cfg", "dtype"))


@functools.partial(jax.jit, static_argnames="cfg")
def _decoder_block(p: Tree, x, positions, segments, cfg: config.DecoderConfig) -> jax.Array:
    """What `decoder.forward` makes of one block's weights, before the last norm."""
    with mock.patch.object(decoder, "final_hidden", lambda p, x, cfg: x):
        return decoder.forward(p, x, positions, segments, cfg)


# Vision towers -----------------------------------------------------------------------------------


def tower(p: Tree, tiles: np.ndarray, cfg: config.VisionConfig, dtype: DTypeLike) -> Arrays:
    """Every block's output and the features, by name."""
    x = _patches(p, vision.normalize(jnp.asarray(tiles), dtype), cfg)
    out = {"embedded": x}
    for i in range(cfg.depth):
        x = out[f"layer.{i}"] = _vision_block(one_block(p, i, stacked=False), x, cfg)
    out["last"] = _encode(p, jnp.asarray(tiles), cfg, dtype)
    return {name: np.asarray(x, np.float32) for name, x in out.items()}


def penultimate(facts: dict, case: Case, seed: int) -> np.ndarray:
    """The features before the last block, through the tower that stops there."""
    cfg = dataclasses.replace(vision_config(facts, case), feature="penultimate")
    p = convert.load_vision(tensors(facts, seed), cfg)
    return np.asarray(_encode(p, jnp.asarray(cases.tiles(case, seed)), cfg, jnp.float32))


def resized(p: Tree, tiles: np.ndarray, cfg: config.VisionConfig) -> np.ndarray:
    """Features of tiles of another size than the position table is for."""
    other = dataclasses.replace(cfg, tile_size=tiles.shape[1])
    p = p | {
        "position": jnp.asarray(vision.resize_positions(np.asarray(p["position"]), other.side))
    }
    return np.asarray(_encode(p, jnp.asarray(tiles), other, jnp.float32))


def vision_config(facts: dict, case: Case) -> config.VisionConfig:
    """The tower's config as imported. SigLIP 2 states patches; the pixels beyond them are ours."""
    cfg = hf_config.vision_config(facts["config"])
    return dataclasses.replace(cfg, tile_size=case.config["image_size"])


# Decoders ----------------------------------------------------------------------------------------


def rows(
    p: Tree, ids: np.ndarray, cfg: config.DecoderConfig, dtype: DTypeLike,
    positions: np.ndarray | None = None, lengths: np.ndarray | None = None, each_block: bool = True,
) -> Arrays:  # fmt: skip
    """Every block's output, the last hidden state and the logits of whole rows."""
    order = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    at = order if positions is None else jnp.asarray(positions, jnp.int32)
    segments = jnp.ones(ids.shape, jnp.int32)
    if lengths is not None:
        segments = (order < jnp.asarray(lengths)[:, None]).astype(jnp.int32)
    start = x = _embed(p, jnp.asarray(ids, jnp.int32), cfg, dtype)
    out = {}
    if each_block:
        out["embedded"] = x
        single = dataclasses.replace(cfg, depth=1)
        for i in range(cfg.depth):
            q = p | {"blocks": one_block(p, i)}
            x = out[f"layer.{i}"] = _decoder_block(q, x, at, segments, single)
    hidden = _forward(p, start, at, segments, cfg)
    out["last"] = hidden.astype(jnp.float32) * cfg.logit_divisor  # The reference divides logits.
    out["logits"] = _logits(p, hidden, cfg)
    return {name: np.asarray(x, np.float32) for name, x in out.items()}


def cached(p: Tree, ids: np.ndarray, cfg: config.DecoderConfig, steps: list[int]) -> np.ndarray:
    """Logits [rows, L, V] of `decoder.extend`, `steps` positions a call, into a cache of exactly L."""
    x = _embed(p, jnp.asarray(ids, jnp.int32), cfg, jnp.float32)
    cache = decoder.init_cache(cfg, ids.shape[0], ids.shape[1], jnp.float32)
    found, start = [], 0
    for step in steps:
        valid = jnp.full(ids.shape[0], step, jnp.int32)
        hidden, cache = _extend(p, x[:, start : start + step], valid, cache, cfg)
        found.append(_logits(p, hidden, cfg))
        start += step
    assert start == ids.shape[1] and (np.asarray(cache.lengths) == start).all()
    return np.concatenate([np.asarray(y) for y in found], axis=1)


def prefilled(p: Tree, ids: np.ndarray, lengths, cfg: config.DecoderConfig, chunk: int) -> Any:
    """Logits [rows, V] at the end of prompts of unequal lengths, `chunk` positions at a time."""
    x = _embed(p, jnp.asarray(ids, jnp.int32), cfg, jnp.float32)
    cache = decoder.init_cache(cfg, ids.shape[0], ids.shape[1], jnp.float32)
    valid = jnp.asarray(lengths, jnp.int32)
    last, _ = _prefill(p, x, valid, cache, cfg, chunk)
    return np.asarray(_logits(p, last, cfg))


def rope(case: Case) -> Arrays:
    """Cosines and sines of one half: ours repeat them, and carry the sign of the rotated half."""
    positions = jnp.asarray([case.config["positions"]], jnp.int32)
    out = {}
    for head_dim, theta in cases.rope_tables(case):
        cos, sin = layers.rope_tables(positions, head_dim, theta)
        half = head_dim // 2
        both = jnp.stack([cos[0, :, half:], sin[0, :, half:]])
        out[f"cos, sin: heads of {head_dim}, base {theta:g}"] = np.asarray(both)
    return out


# Projectors --------------------------------------------------------------------------------------

BETWEEN = {
    "llava_next": (config.Identity(), config.ProjectorConfig(activation="gelu_exact")),
    "internvl": (
        config.PixelShuffle(),
        config.ProjectorConfig(activation="gelu_exact", norm=True, norm_eps=1e-5),
    ),
}


def image_tokens(facts: dict, case: Case, seed: int) -> np.ndarray:
    """The downsampler and projector that config names for LLaVA-NeXT and InternVL."""
    downsampler, projector = BETWEEN[case.family]
    tile = config.VisionConfig(
        tile_size=case.config["side"], patch_size=1, width=case.config["vision_width"], depth=1,
        mlp_dim=1, num_heads=1,
    )  # fmt: skip
    text = config.DecoderConfig(
        vocab_size=1, width=case.config["width"], depth=1, mlp_dim=1, num_heads=1, num_kv_heads=1,
        head_dim=2,
    )  # fmt: skip
    cfg = config.VLMConfig(vision=tile, decoder=text, downsampler=downsampler, projector=projector)
    read = tensors(facts, seed)
    p = {
        f"fc{i}": {"kernel": read[f"linear_{i}.weight"].T, "bias": read[f"linear_{i}.bias"]}
        for i in (1, 2)
    }
    if projector.norm:
        p["norm"] = {"scale": read["layer_norm.weight"], "bias": read["layer_norm.bias"]}
    p = jax.tree.map(jnp.asarray, p)
    x = downsample.downsample({}, jnp.asarray(cases.features(case, seed)), cfg)
    return np.asarray(downsample.project(p, x, cfg))


def greedy(p: Tree, case: Case, seed: int, cfg: config.DecoderConfig) -> np.ndarray:
    """Greedy continuations of unequal prompts, by the library's generation as a whole."""
    tower = config.VisionConfig(tile_size=4, patch_size=4, width=4, depth=1, mlp_dim=4, num_heads=1)
    model = config.VLMConfig(vision=tower, decoder=cfg)
    unused = params.map_params(lambda q: jnp.zeros(q.shape), vlm.specs(model))
    ids = jnp.asarray(cases.tokens(case, seed), jnp.int32)
    prompts = generation.Prompts(
        tokens=ids, lengths=jnp.asarray(cases.row_lengths(case, seed), jnp.int32),
        image_index=jnp.full(ids.shape, batch.TEXT, jnp.int32),
        tiles=jnp.zeros((1, 1, 4, 4, 3), jnp.uint8),
    )  # fmt: skip
    how = generation.SamplingConfig(max_new_tokens=case.new_tokens, prefill_chunk=3)
    never = ()  # No stop token.
    out = generation.generate(
        unused | {"decoder": p}, prompts, jax.random.key(0), cfg=model, sampling=how, stop=never
    )
    return np.asarray(out.tokens)
