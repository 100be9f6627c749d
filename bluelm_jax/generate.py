"""Batched generation over a KV cache: whole answers, or token by token as they come.

`generate` is one compiled program: prompt, loop and all. `stream` yields tokens while the answer is
made: `start` reads the prompts, `decode` goes a few steps a call with the state given back in place.
Both loop over the same `steps.begin` and `steps.advance`, so they choose the same tokens.

Everything is compiled once a (rows, padded prompt, tiles, cache) shape; rows may have prompts of any
length up to the padded one. Weights may be those of `vlm.specs`, or with the decoder part laid out by
`decoding.prepare`, which is faster and takes longer to compile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt8

from bluelm_jax import config, decoder, decoding, steps, vlm
from bluelm_jax.batch import TEXT
from bluelm_jax.params import Tree
from bluelm_jax.sampling import SamplingConfig as SamplingConfig
from bluelm_jax.sampling import choose as choose
from bluelm_jax.sampling import mark_seen
from bluelm_jax.steps import State as State
from bluelm_jax.steps import Stop as Stop
from bluelm_jax.steps import prefill as prefill

NOTHING = -1  # What a streamed row gives at and after its stop token.


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
    """Generated tokens.

    Attributes:
      tokens: what was chosen; behind a row's stop token stands the first of the stop tokens.
      lengths: tokens of each row before its stop token.
      stopped: False for rows that ran out of new tokens.
    """

    tokens: Int[Array, "B T"]
    lengths: Int[Array, "B"]
    stopped: Bool[Array, "B"]


def _read(
    p: Tree, prompts: Prompts, key: Array, cfg: config.VLMConfig, how: SamplingConfig, stop: Stop
) -> State:
    """Prompts into a new cache with room for the answers, and the first tokens."""
    rows, length = prompts.tokens.shape
    total = length + how.max_new_tokens
    if total > cfg.decoder.max_length:
        raise ValueError(
            f"prompt of {length} + {how.max_new_tokens} new tokens exceeds max_length "
            f"{cfg.decoder.max_length}"
        )
    images = vlm.encode_groups(p, prompts.tiles, cfg)
    x = vlm.splice(p, prompts, images, cfg)
    stacked = not decoding.is_prepared(p["decoder"])
    cache = decoder.init_cache(cfg.decoder, rows, total, jnp.dtype(cfg.dtype), stacked=stacked)
    hidden, cache = prefill(p["decoder"], x, prompts.lengths, cache, cfg.decoder, how.prefill_chunk)
    seen = None
    if how.repetition_penalty != 1.0:
        real = jnp.arange(length)[None] < prompts.lengths[:, None]
        counts = real & (prompts.image_index == TEXT)
        nothing = jnp.zeros((rows, cfg.decoder.vocab_size), bool)
        seen = mark_seen(nothing, prompts.tokens, counts)
    return steps.begin(p, hidden, cache, key, cfg=cfg, how=how, stop=stop, seen=seen)


_STATIC = ("cfg", "sampling", "stop")


def generate(
    p: Tree,
    prompts: Prompts,
    key: PRNGKeyArray,
    *,
    cfg: config.VLMConfig,
    sampling: SamplingConfig,
    stop: Stop,
) -> Generated:
    """Continues every prompt until a stop token or max_new_tokens.

    Args:
      p: the weights.
      prompts: what is continued.
      key: seed of all draws.
      cfg: the model.
      sampling: how tokens are chosen.
      stop: the token or tokens that end a row; an empty one lets all rows fill up.

    Raises:
      ValueError: prompt and new tokens exceed the decoder's max_length, or a stop token is none of
        the vocabulary.
    """
    ids = steps.check_stop(stop, cfg.decoder.vocab_size)
    return _generate(p, prompts, key, cfg=cfg, sampling=sampling, stop=ids)


@functools.partial(jax.jit, static_argnames=_STATIC)
def _generate(
    p: Tree,
    prompts: Prompts,
    key: PRNGKeyArray,
    *,
    cfg: config.VLMConfig,
    sampling: SamplingConfig,
    stop: tuple[int, ...],
) -> Generated:
    state = _read(p, prompts, key, cfg, sampling, stop)
    out = jnp.full((len(state.token), sampling.max_new_tokens), steps.filler(stop), jnp.int32)
    out = out.at[:, 0].set(state.token)

    def once(filled: Array, state: State, out: Array):
        state = steps.advance(p, state, key, cfg=cfg, how=sampling, stop=stop)
        return filled + 1, state, out.at[:, filled].set(state.token)

    _, state, out = _while_going(once, (jnp.int32(1), state, out), sampling)
    return Generated(tokens=out, lengths=state.count, stopped=state.done)


def _while_going(once, carry, how: SamplingConfig):
    """Repeats `once` while a row is unfinished, tokens are left, and `out` has columns left."""

    def unfinished(carry) -> Array:
        filled, state, out = carry
        return (filled < out.shape[1]) & (state.step < how.max_new_tokens) & ~state.done.all()

    return jax.lax.while_loop(unfinished, lambda carry: once(*carry), carry)


# An answer as it comes ----------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=_STATIC)
def start(
    p: Tree,
    prompts: Prompts,
    key: PRNGKeyArray,
    *,
    cfg: config.VLMConfig,
    sampling: SamplingConfig,
    stop: int | tuple[int, ...],
) -> State:
    """Reads the prompts and chooses the first token of each row; errors as for `generate`."""
    return _read(p, prompts, key, cfg, sampling, stop)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "count"), donate_argnames="state")
def decode(
    p: Tree,
    state: State,
    key: PRNGKeyArray,
    *,
    cfg: config.VLMConfig,
    sampling: SamplingConfig,
    stop: int | tuple[int, ...],
    count: int,
) -> tuple[State, Int[Array, "B T"], Int[Array, ""]]:
    """Up to `count` further tokens of each row.

    The given state is used up: its arrays become those of the result.

    Returns:
      The state, the tokens (NOTHING from a row's stop token on), and how many columns are filled;
      fewer than `count` once max_new_tokens is reached or all rows have stopped.
    """
    out = jnp.full((len(state.token), count), NOTHING, jnp.int32)

    def once(filled: Array, state: State, out: Array):
        state = steps.advance(p, state, key, cfg=cfg, how=sampling, stop=stop)
        shown = jnp.where(state.done, NOTHING, state.token)
        return filled + 1, state, out.at[:, filled].set(shown)

    filled, state, out = _while_going(once, (jnp.int32(0), state, out), sampling)
    return state, out, filled


def follow(
    p: Tree,
    state: State,
    key: PRNGKeyArray,
    *,
    cfg: config.VLMConfig,
    sampling: SamplingConfig,
    stop: int | tuple[int, ...],
    count: int = 4,
) -> Iterator[tuple[State, ArrayLike, ArrayLike]]:
    """Goes on from a state of `begin`, yielding what `decode` returns.

    The first triple holds the token that `begin` chose. What is yielded may still be computed: who
    breaks off waiting for it has the state. A yielded state is used up by the next step.
    """
    shown = np.where(state.done, NOTHING, state.token)
    yield state, shown[:, None].astype(np.int32), 1
    while int(state.step) < sampling.max_new_tokens and not bool(state.done.all()):
        state, out, filled = decode(
            p, state, key, cfg=cfg, sampling=sampling, stop=stop, count=count
        )
        yield state, out, filled


def stream(
    p: Tree,
    prompts: Prompts,
    key: PRNGKeyArray,
    *,
    cfg: config.VLMConfig,
    sampling: SamplingConfig,
    stop: Stop,
    count: int = 4,
) -> Iterator[np.ndarray]:
    """The tokens that `generate` gives, as they come: int32 [B], once a position.

    A row gives NOTHING from its stop token on. The iterator ends when all rows have stopped or
    max_new_tokens is reached; leaving it early stops the work.

    Args:
      count: steps a call of the compiled function. More save dispatches, fewer show a token sooner.
    """
    ids = steps.check_stop(stop, cfg.decoder.vocab_size)
    state = start(p, prompts, key, cfg=cfg, sampling=sampling, stop=ids)
    same = {"cfg": cfg, "sampling": sampling, "stop": ids, "count": count}
    for _, tokens, filled in follow(p, state, key, **same):
        yield from np.asarray(tokens)[:, : int(np.asarray(filled))].T
