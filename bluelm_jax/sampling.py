"""Choosing the next token from logits: pure functions.

The order is that of transformers' `generate`: repetition penalty, the ban on stopping, temperature,
top-k, top-p, then the draw.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from bluelm_jax.sampling_config import SamplingConfig as SamplingConfig


def penalise(
    scores: Float[Array, "B V"], seen: Bool[Array, "B V"], penalty: float
) -> Float[Array, "B V"]:
    """Logits of `seen` tokens, divided by `penalty` above zero and multiplied below."""
    return jnp.where(seen, jnp.where(scores > 0, scores / penalty, scores * penalty), scores)


def mark_seen(
    seen: Bool[Array, "B V"], tokens: Int[Array, "B T"], counts: Bool[Array, "B T"]
) -> Bool[Array, "B V"]:
    """`seen` with the tokens added whose place `counts`."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    outside = jnp.where(counts, tokens, seen.shape[1])
    return seen.at[rows, outside].set(True, mode="drop")


def choose(scores: Float[Array, "B V"], key: PRNGKeyArray, cfg: SamplingConfig) -> Int[Array, "B"]:
    """The next token of each row from its logits, by temperature, top-k and top-p."""
    if cfg.temperature == 0.0:
        return scores.argmax(-1).astype(jnp.int32)
    scores = scores / cfg.temperature
    if cfg.top_k:
        k = min(cfg.top_k, scores.shape[-1])
        kth = jax.lax.top_k(scores, k)[0][:, -1:]
        scores = jnp.where(scores < kth, -jnp.inf, scores)
    if cfg.top_p < 1.0:
        ranked = jnp.sort(scores, axis=-1)[:, ::-1]
        share = jax.nn.softmax(ranked, axis=-1)
        # The first token that reaches p stays in: count the ranks whose mass before them is < p.
        kept = (jnp.cumsum(share, axis=-1) - share < cfg.top_p).sum(-1, keepdims=True)
        scores = jnp.where(scores < jnp.take_along_axis(ranked, kept - 1, -1), -jnp.inf, scores)
    return jax.random.categorical(key, scores, axis=-1).astype(jnp.int32)


def forbid(
    scores: Float[Array, "B V"], stop: tuple[int, ...], when: Bool[Array, ""]
) -> Float[Array, "B V"]:
    """Logits without the stop tokens where `when` holds."""
    banned = scores.at[:, jnp.array(stop, jnp.int32)].set(-jnp.inf)
    return jnp.where(when, banned, scores)
