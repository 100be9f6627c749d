"""Batched generation over a KV cache: greedy, or temperature with top-k and top-p.

Everything is compiled once a (batch, prompt length, tiles, new tokens) shape; rows may have prompts
of any length up to the padded one.
"""

from __future__ import annotations

import dataclasses
import functools

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from bluelm_jax import config, decoder, vlm
from bluelm_jax.config import check
from bluelm_jax.decoder import KVCache
from bluelm_jax.params import Tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How tokens are chosen.

    Attributes:
      max_new_tokens: tokens generated at most, the stop token included.
      temperature: 0 is greedy.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of tokens whose probability reaches p.
      prefill_chunk: prompt positions a call of the decoder (the phone uses 128); 0 takes all.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    prefill_chunk: int = 0

    def __post_init__(self):
        check(self, "max_new_tokens", self.max_new_tokens > 0, "> 0")
        check(self, "temperature", self.temperature >= 0, ">= 0")
        check(self, "top_k", self.top_k >= 0, ">= 0")
        check(self, "top_p", 0 < self.top_p <= 1, "in (0, 1]")
        check(self, "prefill_chunk", self.prefill_chunk >= 0, ">= 0")


@flax.struct.dataclass
class Prompts:
    """A batch of prompts, padded on the right.

    The same fields as `Batch`; `lengths` counts the positions of each row that are real.
    """

    tokens: Int[Array, "B L"]
    lengths: Int[Array, "B"]
    image_index: Int[Array, "B L"]
    tiles: UInt8[Array, "G I S S 3"]
    corner_index: Int[Array, "B L 4"] | None = None
    corner_weights: Float[Array, "B L 4"] | None = None


@flax.struct.dataclass
class Generated:
    """Generated tokens; positions from `lengths` on hold the stop token.

    `lengths` excludes the stop token; `stopped` is False for rows that ran out of new tokens.
    """

    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    stopped: Bool[Array, "B"]


def choose(scores: Float[Array, "B V"], key: PRNGKeyArray, cfg: SamplingConfig) -> Int[Array, "B"]:
    """The next token of each row from its logits."""
    if cfg.temperature == 0.0:
        return scores.argmax(-1).astype(jnp.int32)
    scores = scores / cfg.temperature
    if cfg.top_k:
        k = min(cfg.top_k, scores.shape[-1])
        kth = jax.lax.top_k(scores, k)[0][:, -1:]
        scores = jnp.where(scores < kth, -jnp.inf, scores)
    if cfg.top_p < 1.0:
        ranked = jnp.sort(scores, axis=-1)[:, ::-1]
        mass = jnp.cumsum(jax.nn.softmax(ranked, axis=-1), axis=-1)
        # The first token that reaches p stays in: count the ranks whose mass before them is < p.
        kept = (mass - jax.nn.softmax(ranked, axis=-1) < cfg.top_p).sum(-1, keepdims=True)
        scores = jnp.where(scores < jnp.take_along_axis(ranked, kept - 1, -1), -jnp.inf, scores)
    return jax.random.categorical(key, scores, axis=-1).astype(jnp.int32)


def prefill(
    p: Tree,
    x: Float[Array, "B L D"],
    lengths: Int[Array, "B"],
    cache: KVCache,
    cfg: config.DecoderConfig,
    chunk: int = 0,
) -> tuple[Float[Array, "B D"], KVCache]:
    """Runs prompts into an empty cache, `chunk` positions at a time (0: all at once).

    Returns:
      The hidden state at each row's last real position, and the filled cache.
    """
    batch, total, width = x.shape
    chunk = total if chunk == 0 else min(chunk, total)
    pad = -total % chunk
    x = jnp.pad(x, ((0, 0), (0, pad), (0, 0)))
    pieces = jnp.moveaxis(x.reshape(batch, -1, chunk, width), 1, 0)
    starts = jnp.arange(pieces.shape[0]) * chunk

    def step(carry, piece):
        cache, last = carry
        x, start = piece
        valid = jnp.clip(lengths - start, 0, chunk)
        hidden, cache = decoder.extend(p, x, valid, cache, cfg)
        at = jnp.clip(valid - 1, 0)[:, None, None]
        here = jnp.take_along_axis(hidden, at, axis=1)[:, 0]
        return (cache, jnp.where((valid > 0)[:, None], here, last)), None

    (cache, last), _ = jax.lax.scan(step, (cache, jnp.zeros_like(x[:, 0])), (pieces, starts))
    return last, cache


@functools.partial(jax.jit, static_argnames=("cfg", "sampling", "stop"))
def generate(
    p: Tree,
    prompts: Prompts,
    key: PRNGKeyArray,
    *,
    cfg: config.VLMConfig,
    sampling: SamplingConfig,
    stop: int,
) -> Generated:
    """Continues every prompt until `stop` or max_new_tokens.

    Raises:
      ValueError: prompt and new tokens exceed the decoder's max_length.
    """
    batch, length = prompts.tokens.shape
    new = sampling.max_new_tokens
    if length + new > cfg.decoder.max_length:
        raise ValueError(
            f"prompt of {length} + {new} new tokens exceeds max_length {cfg.decoder.max_length}"
        )
    images = vlm.encode_groups(p, prompts.tiles, cfg)
    x = vlm.splice(p, prompts, images, cfg)
    cache = decoder.init_cache(cfg.decoder, batch, length + new, jnp.dtype(cfg.dtype))
    hidden, cache = prefill(
        p["decoder"], x, prompts.lengths, cache, cfg.decoder, sampling.prefill_chunk
    )

    def pick(hidden: Array, step: Array | int) -> Array:
        scores = decoder.logits(p["decoder"], hidden, cfg.decoder)
        return choose(scores, jax.random.fold_in(key, step), sampling)

    def unfinished(carry) -> Array:
        step, _, _, _, done = carry
        return (step < new) & ~done.all()

    def advance(carry):
        step, token, out, cache, done = carry
        out = out.at[:, step].set(jnp.where(done, stop, token))
        done = done | (token == stop)
        x = decoder.embed_tokens(p["decoder"], token[:, None], cfg.decoder, jnp.dtype(cfg.dtype))
        hidden, cache = decoder.extend(
            p["decoder"], x, (~done).astype(jnp.int32), cache, cfg.decoder
        )
        return step + 1, pick(hidden[:, 0], step + 1), out, cache, done

    out = jnp.full((batch, new), stop, jnp.int32)
    # Rows without a prompt, which fill up a batch, count as stopped from the start.
    start = (jnp.int32(0), pick(hidden, 0), out, cache, prompts.lengths == 0)
    _, _, out, _, done = jax.lax.while_loop(unfinished, advance, start)
    return Generated(tokens=out, lengths=(out != stop).sum(-1), stopped=done)
