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
    """The next token of each row from its logits, by temperature, top-k and top-p.

    Ties at a border are cut as in transformers: top-k goes by value, so every token as likely as the
    k-th stays; top-p goes by rank, so as many stay as there. Which of equally likely tokens those are
    is left to the sort there; here it is the higher ids.
    """
    if cfg.temperature == 0.0:
        return scores.argmax(-1).astype(jnp.int32)
    scores = scores / cfg.temperature
    if cfg.top_k:
        k = min(cfg.top_k, scores.shape[-1])
        kth = jax.lax.top_k(scores, k)[0][:, -1:]
        scores = jnp.where(scores < kth, -jnp.inf, scores)
    if cfg.top_p < 1.0:
        scores = _nucleus(scores, cfg.top_p)
    return jax.random.categorical(key, scores, axis=-1).astype(jnp.int32)


def _nucleus(scores: Float[Array, "B V"], top_p: float) -> Float[Array, "B V"]:
    """Logits without the tail of least likely tokens whose probability together is <= 1 - p.

    Found by rank, from the least likely on. A threshold by value would keep all tokens that tie at
    the border, which for a flat distribution is the whole vocabulary.
    """
    ids = jnp.broadcast_to(jnp.arange(scores.shape[1])[None], scores.shape)
    ranked, ids = jax.lax.sort((scores, ids), dimension=1, is_stable=True, num_keys=1)
    tail = jnp.cumsum(jax.nn.softmax(ranked, axis=-1), axis=-1) <= 1 - top_p
    tail = tail.at[:, -1].set(False)  # One token always stays.
    dropped = jnp.zeros_like(tail).at[jnp.arange(len(scores))[:, None], ids].set(tail)
    return jnp.where(dropped, -jnp.inf, scores)


def forbid(
    scores: Float[Array, "B V"], stop: tuple[int, ...], when: Bool[Array, ""]
) -> Float[Array, "B V"]:
    """Logits without the stop tokens where `when` holds."""
    banned = scores.at[:, jnp.array(stop, jnp.int32)].set(-jnp.inf)
    return jnp.where(when, banned, scores)
