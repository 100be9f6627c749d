"""What a chat is made of: the conversation, an answer under way, and the compiled steps.

The tokens of a conversation are the truth; its cache is what has been computed of them. Each step
uses up the cache that it is given, so one that is broken off may leave none. Then the tokens are read
again, which is possible where all of them are text: the pixels of earlier images are not kept.

The steps are tiles to image tokens, and chunks of a prompt into the cache. All shapes are rounded
up: see `chat`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Generator, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bluelm_jax import config, decoder, generate, steps, vlm
from bluelm_jax.batch import TEXT as TEXT
from bluelm_jax.data.examples import Example
from bluelm_jax.decoder import KVCache
from bluelm_jax.params import Tree
from bluelm_jax.sampling import SamplingConfig

CHUNK = 128  # Positions a call of the decoder, as on the phone.
SMALLEST_CACHE = 256
TILE_BATCH = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Pending:
    """Positions that the cache has not read yet, and the tiles that they refer to.

    Fields are those of `generate.Prompts` for one row, as NumPy arrays without the row.
    """

    tokens: np.ndarray
    image_index: np.ndarray
    tiles: np.ndarray
    corner_index: np.ndarray | None
    corner_weights: np.ndarray | None

    @classmethod
    def of(cls, tokens: np.ndarray, cached: int, turn: Example) -> Pending:
        """`tokens` from `cached` on; the last ones are those of `turn`, the ones before are text."""
        before = len(tokens) - cached - turn.length

        def behind(values: np.ndarray | None, fill: int) -> np.ndarray | None:
            if values is None:
                return None
            front = np.full((before, *values.shape[1:]), fill, values.dtype)
            return np.concatenate([front, values])

        index = np.concatenate([np.full(before, TEXT, np.int32), turn.image_index])
        corners = behind(turn.corner_index, 0), behind(turn.corner_weights, 0)
        return cls(tokens[cached:], index, turn.tiles, *corners)


@dataclasses.dataclass(frozen=True, eq=False)
class Conversation:
    """What was said so far, as tokens, and the cache that has read (most of) them.

    Attributes:
      tokens: int32 [n], prompts and answers; the pad id at image positions.
      is_text: bool [n], False at image positions.
      cache: keys and values of the first `cached` tokens; None before the first turn, or where it
        was lost. It is used up by the next turn: a conversation can be continued once.
      cached: tokens that the cache holds.
      turns: answers so far.
    """

    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    is_text: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))
    cache: KVCache | None = None
    cached: int = 0
    turns: int = 0

    @property
    def is_lost(self) -> bool:
        """Whether the cache is gone and tokens alone cannot make up for it: there were images."""
        return self.cache is None and not self.is_text.all()

    def check_usable(self) -> None:
        """Raises ValueError where no turn can follow."""
        if self.is_lost:
            raise ValueError("this conversation's cache was used up; start a new chat")
        if self.cache is not None and _is_used_up(self.cache):
            raise ValueError("this conversation was continued already; go on from the later one")

    def resumed(self, *caches: KVCache | None) -> Conversation:
        """This conversation over the first of the caches that still exists, or else over none.

        A cache may have read further than this conversation goes: what lies behind is forgotten.
        """
        for cache in caches:
            if cache is None or _is_used_up(cache):
                continue
            have, want = int(cache.lengths[0]), len(self.tokens)
            if have > want:
                cache = dataclasses.replace(cache, lengths=jnp.array([want], jnp.int32))
            return dataclasses.replace(self, cache=cache, cached=min(have, want))
        return dataclasses.replace(self, cache=None, cached=0)


def _is_used_up(cache: KVCache) -> bool:
    """Whether a step was given the cache and put another in its place."""
    return any(x.is_deleted() for x in jax.tree.leaves(cache))


Pieces = Callable[["Answer"], Generator[str, None, None]]


class Answer:
    """An answer on its way: iterate over it once, for pieces of text as they come.

    Attributes:
      text: the pieces so far.
      new_tokens: tokens so far, without the stop token.
      begun: whether its first token has been chosen.
      cache: the newest cache, which may have read further than `new_tokens`; None before the first.
    """

    def __init__(self, pieces: Pieces, past: Conversation, asked: Conversation):
        self._pieces, self._past, self._asked = pieces(self), past, asked
        self.text, self.begun = "", False
        self.new_tokens: list[int] = []
        self.cache: KVCache | None = None

    def __iter__(self) -> Iterator[str]:
        if not self.begun:
            self._past.check_usable()  # Another answer may have begun since.
        for piece in self._pieces:
            self.text += piece
            yield piece

    def take(self, tokens: list[int]) -> None:
        """Adds tokens that were chosen."""
        self.new_tokens += tokens
        self.begun = True

    @property
    def conversation(self) -> Conversation:
        """The conversation with this answer, which may have been left before its end.

        Raises:
          ValueError: nothing of the answer has been taken yet.
        """
        if not self.begun:
            raise ValueError("the answer has not begun: iterate over it first")
        added, asked = np.array(self.new_tokens, np.int32), self._asked
        said = dataclasses.replace(
            asked,
            tokens=np.concatenate([asked.tokens, added]),
            is_text=np.concatenate([asked.is_text, np.ones(len(added), bool)]),
            turns=asked.turns + 1,
        )
        return said.resumed(self.cache)

    def settle(self) -> Conversation:
        """Ends the answer where it is; what a chat goes on from, also after an exception.

        That is `conversation` if the answer has begun. Otherwise, and where the cache was lost with
        images of this question, it is the conversation before the question.
        """
        self._pieces.close()
        if self.begun and not (said := self.conversation).is_lost:
            return said
        return self._past.resumed(self.cache, self._past.cache)


def cache_size(positions: int) -> int:
    """The bucket for so many positions: 256 times a power of two."""
    size = SMALLEST_CACHE
    while size < positions:
        size *= 2
    return size


def room_for(cache: KVCache | None, positions: int, cfg: config.VLMConfig) -> KVCache:
    """A cache of one row with room for `positions`: the given one, it grown, or a new one."""
    size = cache_size(positions)
    if cache is None:
        dtype = jnp.dtype(cfg.dtype)
        return decoder.init_cache(cfg.decoder, 1, size, dtype, stacked=False)
    if cache.size >= size:
        return cache
    more = [(0, 0), (0, 0), (0, size - cache.size), (0, 0)]
    k, v = (tuple(jnp.pad(x, more) for x in part) for part in (cache.k, cache.v))
    return dataclasses.replace(cache, k=k, v=v)


def read(
    p: Tree, pending: Pending, cache: KVCache, cfg: config.VLMConfig
) -> Iterator[tuple[Float[Array, "B D"], KVCache]]:
    """Appends the pending positions; yields the last hidden state and the cache after each chunk.

    The given cache is used up, and so is each yielded one by the next chunk.
    """
    images = encode(p, pending.tiles, cfg)
    count = len(pending.tokens)
    for start in range(0, count, CHUNK):
        prompts = _chunk(pending, start, min(start + CHUNK, count))
        hidden, cache = _append(p, prompts, images, cache, cfg=cfg)
        yield hidden, cache


def _chunk(pending: Pending, start: int, stop: int) -> generate.Prompts:
    """Positions start..stop as a row padded to CHUNK."""

    def row(values: np.ndarray | None, fill: int) -> Array | None:
        if values is None:
            return None
        out = np.full((1, CHUNK, *values.shape[1:]), fill, values.dtype)
        out[0, : stop - start] = values[start:stop]
        return jnp.asarray(out)

    tokens, index = row(pending.tokens, 0), row(pending.image_index, TEXT)
    assert tokens is not None and index is not None
    no_tiles = jnp.zeros((1, 0, *pending.tiles.shape[1:]), jnp.uint8)  # They are encoded already.
    return generate.Prompts(
        tokens=tokens, lengths=jnp.array([stop - start], jnp.int32), image_index=index,
        tiles=no_tiles, corner_index=row(pending.corner_index, 0),
        corner_weights=row(pending.corner_weights, 0),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="cache")
def _append(
    p: Tree,
    prompts: generate.Prompts,
    images: Float[Array, "G IQ D"],
    cache: KVCache,
    *,
    cfg: config.VLMConfig,
) -> tuple[Float[Array, "B D"], KVCache]:
    x = vlm.splice(p, prompts, images, cfg)
    return steps.prefill(p["decoder"], x, prompts.lengths, cache, cfg.decoder)


def encode(p: Tree, tiles: np.ndarray, cfg: config.VLMConfig) -> Float[Array, "G IQ D"]:
    """Tokens of all tiles [I, S, S, 3], as one group; the count of tiles is rounded up.

    Groups of TILE_BATCH go through the tower, the rest as the next power of two. The result is padded
    to a power of two of tiles, so that few shapes follow from it.
    """
    if len(tiles) == 0:
        return vlm.encode_groups(p, jnp.zeros((1, 0, *tiles.shape[1:]), jnp.uint8), cfg)
    parts = []
    for start in range(0, len(tiles), TILE_BATCH):
        part = tiles[start : start + TILE_BATCH]
        wanted = next(size for size in (1, 2, TILE_BATCH) if size >= len(part))
        parts.append(_encode(p, jnp.asarray(_padded(part, wanted)), cfg=cfg))
    tokens = np.concatenate([np.asarray(part) for part in parts])[: len(tiles)]
    padded = _padded(tokens, 2 ** (len(tiles) - 1).bit_length())
    return jnp.asarray(padded.reshape(1, -1, padded.shape[-1]))


def _padded(values: np.ndarray, count: int) -> np.ndarray:
    more = np.zeros((count - len(values), *values.shape[1:]), values.dtype)
    return np.concatenate([values, more])


_encode = jax.jit(vlm.encode_tiles, static_argnames="cfg")


def seen(
    tokens: np.ndarray, is_text: np.ndarray, cfg: config.VLMConfig, how: SamplingConfig
) -> Array | None:
    """Tokens that the repetition penalty counts, bool [1, V]; None without a penalty."""
    if how.repetition_penalty == 1.0:
        return None
    found = np.zeros((1, cfg.decoder.vocab_size), bool)
    found[0, tokens[is_text]] = True
    return jnp.asarray(found)


# `steps.begin`, compiled; cache and `seen` are used up.
begin = jax.jit(
    steps.begin, static_argnames=("cfg", "how", "stop"), donate_argnames=("cache", "seen")
)
