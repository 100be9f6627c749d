"""The multimodal model: image tokens spliced into text embeddings, then the decoder.

image tiles -> ViT -> downsampler -> projector -> tokens; each sequence position takes either a text
embedding or the image token that `image_index` names (BlueLM-V-3B, sec. 3.1).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt8

from bluelm_jax import config, decoder, downsample, vision
from bluelm_jax.batch import NEWLINE, Batch
from bluelm_jax.params import Param, Tree
from bluelm_jax.sharding import shard


def specs(cfg: config.VLMConfig) -> Tree:
    """Declares every weight of the model, by part; stages choose among these parts.

    A part without weights (a downsampler that only moves features) is left out.
    """
    tree = {
        "vision": vision.specs(cfg.vision),
        "downsampler": downsample.specs(cfg),
        "projector": downsample.projector_specs(cfg),
        "decoder": decoder.specs(cfg.decoder),
    }
    if cfg.newline:
        tree["newline"] = Param((cfg.decoder.width,), ("embed",), 0.02, decay=False)
    return {part: declared for part, declared in tree.items() if declared}


def encode_tiles(
    p: Tree, tiles: UInt8[Array, "I S S 3"], cfg: config.VLMConfig
) -> Float[Array, "I Q D"]:
    """Tiles to Q tokens each, in the decoder's width."""
    x = vision.encode(p["vision"], tiles, cfg.vision, jnp.dtype(cfg.dtype))
    x = downsample.downsample(p.get("downsampler", {}), x, cfg)
    x = downsample.project(p.get("projector", {}), x, cfg)
    return shard(x, "tiles", "seq", "features")


def encode_groups(
    p: Tree, tiles: UInt8[Array, "G I S S 3"], cfg: config.VLMConfig
) -> Float[Array, "G IQ D"]:
    """All tiles of all groups through the tower as one batch; without tiles nothing is computed."""
    groups, count = tiles.shape[:2]
    if count == 0:  # Text alone: one token that nothing refers to, and the tower may be absent.
        return jnp.zeros((groups, 1, cfg.decoder.width), jnp.dtype(cfg.dtype))
    x = encode_tiles(p, tiles.reshape(groups * count, *tiles.shape[2:]), cfg)
    return x.reshape(groups, count * x.shape[1], x.shape[2])


@runtime_checkable
class Sequences(Protocol):
    """What `splice` reads: a `Batch`, or the prompts of a generation."""

    tokens: Array
    image_index: Array
    corner_index: Array | None
    corner_weights: Array | None


def _gather(images: Float[Array, "G IQ D"], index: Int[Array, "B *K"]) -> Float[Array, "B *K D"]:
    """Tokens by their place among those of each row's group."""
    flat = jnp.maximum(index, 0).reshape(images.shape[0], -1, 1)
    return jnp.take_along_axis(images, flat, axis=1).reshape(*index.shape, images.shape[-1])


def splice(
    p: Tree, sequences: Sequences, images: Float[Array, "G IQ D"], cfg: config.VLMConfig
) -> Float[Array, "B L D"]:
    """Text embeddings with the image tokens put in their places.

    Row b gathers from the tokens of its group, b * G // B, only.
    """
    index = sequences.image_index
    text = decoder.embed_tokens(p["decoder"], sequences.tokens, cfg.decoder, jnp.dtype(cfg.dtype))
    if sequences.corner_index is None:
        picked = _gather(images, index)
    else:
        corners = _gather(images, sequences.corner_index)
        weights = jnp.asarray(sequences.corner_weights, corners.dtype)
        picked = (corners * weights[..., None]).sum(axis=-2)
    x = jnp.where((index >= 0)[..., None], picked, text)
    if cfg.newline and "newline" in p:  # A language model alone has none, and no images.
        row_end = p["newline"][None, None].astype(x.dtype)
        x = jnp.where((index == NEWLINE)[..., None], row_end, x)
    return shard(x, "batch", "seq", "features")


def embed(p: Tree, batch: Batch, cfg: config.VLMConfig) -> Float[Array, "B L D"]:
    """Decoder inputs of a batch."""
    images = encode_groups(p, batch.tiles, cfg)
    return splice(p, batch, images, cfg)


def forward(p: Tree, batch: Batch, cfg: config.VLMConfig) -> Float[Array, "B L D"]:
    """Final hidden states; `decoder.logits` turns them into logits."""
    x = embed(p, batch, cfg)
    return decoder.forward(p["decoder"], x, batch.positions, batch.segments, cfg.decoder)


def logits(p: Tree, batch: Batch, cfg: config.VLMConfig) -> Float[jax.Array, "B L V"]:
    """float32 logits at every position (tests and small models; training chunks them)."""
    return decoder.logits(p["decoder"], forward(p, batch, cfg), cfg.decoder)
