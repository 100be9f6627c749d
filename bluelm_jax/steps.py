"""One token more, for every row: what all ways of generating share.

`begin` follows a prefill and chooses the first token of each row, `advance` reads the token chosen
last and chooses the next one. `generate` and `chat` are loops around them.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterable
from typing import SupportsIndex

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from bluelm_jax import config, decoder
from bluelm_jax.decoder import KVCache
from bluelm_jax.params import Tree
from bluelm_jax.sampling import SamplingConfig, choose, forbid, mark_seen, penalise

Stop = SupportsIndex | Iterable[SupportsIndex]


@flax.struct.dataclass
class State:
    """Generation under way.

    Attributes:
      cache: keys and values of everything but `token`.
      token: the token chosen last, which the decoder has not read yet.
      done: rows that have chosen a stop token.
      count: tokens of each row, without the stop token.
      step: tokens chosen so far, the same for all rows.
      seen: tokens that the repetition penalty counts, None without one.
    """

    cache: KVCache
    token: Int[Array, "B"]
    done: Bool[Array, "B"]
    count: Int[Array, "B"]
    step: Int[Array, ""]
    seen: Bool[Array, "B V"] | None = None


def prefill(
    p: Tree,
    x: Float[Array, "B L D"],
    lengths: Int[Array, "B"],
    cache: KVCache,
    cfg: config.DecoderConfig,
    chunk: int = 0,
) -> tuple[Float[Array, "B D"], KVCache]:
    """Appends prompts to a cache, `chunk` positions at a time (0: all at once).

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

    carry = (cache, jnp.zeros_like(x[:, 0]))
    if len(pieces) == 1:  # No loop, whose carried cache would be copied into it.
        (cache, last), _ = step(carry, (pieces[0], starts[0]))
    else:
        (cache, last), _ = jax.lax.scan(step, carry, (pieces, starts))
    return last, cache


def stop_ids(stop: Stop) -> tuple[int, ...]:
    """The stop tokens, one or any iterable of them (NumPy's integers too), as a tuple of ints.

    Raises:
      TypeError: something in it is not an integer.
    """
    if isinstance(stop, Iterable) and getattr(stop, "ndim", 1):  # A NumPy scalar array is one.
        return tuple(operator.index(each) for each in stop)
    return (operator.index(stop),)  # pyright: ignore[reportArgumentType]


def check_stop(stop: Stop, vocab_size: int) -> tuple[int, ...]:
    """`stop_ids`, checked against the vocabulary.

    Raises:
      TypeError: something in it is not an integer.
      ValueError: an id is outside the vocabulary, so that it would never stop anything.
    """
    ids = stop_ids(stop)
    for each in ids:
        if not 0 <= each < vocab_size:
            raise ValueError(f"stop token {each}: must be in 0..{vocab_size - 1}, the vocabulary")
    return ids


def _among(tokens: Int[Array, "*B"], stop: Stop) -> Bool[Array, "*B"]:
    found = jnp.zeros(tokens.shape, bool)
    for each in stop_ids(stop):
        found = found | (tokens == each)
    return found


def filler(stop: Stop) -> int:
    """What stands behind a stop token."""
    return (*stop_ids(stop), 0)[0]


def begin(
    p: Tree,
    hidden: Float[Array, "B D"],
    cache: KVCache,
    key: PRNGKeyArray,
    *,
    cfg: config.VLMConfig,
    how: SamplingConfig,
    stop: Stop,
    seen: Bool[Array, "B V"] | None = None,
) -> State:
    """The state after the first token of each row; rows without a prompt count as stopped.

    Args:
      p: the weights.
      hidden: final hidden state at each row's last position.
      cache: the cache that holds the prompts.
      key: seed of all draws of this answer.
      cfg: the model.
      how: how tokens are chosen.
      stop: the token or tokens that end a row.
      seen: tokens of the prompts; needed with a repetition penalty.
    """
    rows = len(hidden)
    empty = State(
        cache=cache, token=jnp.zeros(rows, jnp.int32), done=cache.lengths == 0,
        count=jnp.zeros(rows, jnp.int32), step=jnp.int32(0), seen=seen,
    )  # fmt: skip
    return _pick(p, hidden, empty, key, cfg, how, stop)


def advance(
    p: Tree,
    state: State,
    key: PRNGKeyArray,
    *,
    cfg: config.VLMConfig,
    how: SamplingConfig,
    stop: Stop,
) -> State:
    """Reads each row's last token and chooses the next one."""
    going = (~state.done).astype(jnp.int32)
    dtype = jnp.dtype(cfg.dtype)
    x = decoder.embed_tokens(p["decoder"], state.token[:, None], cfg.decoder, dtype)
    hidden, cache = decoder.extend(p["decoder"], x, going, state.cache, cfg.decoder)
    return _pick(p, hidden[:, 0], dataclasses.replace(state, cache=cache), key, cfg, how, stop)


def _pick(
    p: Tree,
    hidden: Array,
    state: State,
    key: Array,
    cfg: config.VLMConfig,
    how: SamplingConfig,
    stop: Stop,
) -> State:
    scores = decoder.logits(p["decoder"], hidden, cfg.decoder)
    if state.seen is not None:
        scores = penalise(scores, state.seen, how.repetition_penalty)
    if how.min_new_tokens and stop_ids(stop):
        scores = forbid(scores, stop_ids(stop), state.step < how.min_new_tokens)
    token = choose(scores, jax.random.fold_in(key, state.step), how)
    token = jnp.where(state.done, filler(stop), token)
    seen = state.seen
    if seen is not None:
        seen = mark_seen(seen, token[:, None], ~state.done[:, None])
    done = state.done | _among(token, stop)
    return dataclasses.replace(
        state, token=token, done=done, count=state.count + ~done, step=state.step + 1, seen=seen
    )
