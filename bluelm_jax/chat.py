"""Questions and answers in turns, images among them, over one KV cache.

`Chat` holds what does not change (weights, run config, tokenizer); a `Conversation` is a value, and
`ask` returns the next one. Only what the cache lacks is read: of a later turn the end of the last
answer, the question and its images. Tokens are those of training: the questions go through the same
planner, and answers stay the tokens that were generated, never text encoded again.

Shapes are rounded up so that a long chat compiles little: prompts are read in chunks of 128
positions, caches hold 256 positions times a power of two, tiles go through the vision tower by 4 (or
2, or 1). So a turn compiles something only when the cache outgrows its size or a number of tiles is
new.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import jax
import numpy as np
from PIL import Image

from bluelm_jax import chat_engine as engine
from bluelm_jax import decoding, generate
from bluelm_jax.data import conversation
from bluelm_jax.data import images as image_files
from bluelm_jax.data import tokenizer as tokenizers
from bluelm_jax.data.examples import Example, ExampleMaker
from bluelm_jax.data.plans import Planner
from bluelm_jax.data.text_stream import TextStream
from bluelm_jax.data_config import SourceConfig
from bluelm_jax.decoder import KVCache
from bluelm_jax.params import Tree
from bluelm_jax.run_config import RunConfig
from bluelm_jax.sampling import SamplingConfig

ImageLike = str | os.PathLike[str] | Image.Image
_GREEDY = SamplingConfig()


class PromptTooLongError(ValueError):
    """A conversation that the model has no positions for; the message has the numbers."""


@dataclasses.dataclass(frozen=True, eq=False)
class Conversation:
    """What was said so far, as tokens, and the cache that has read (most of) them.

    Attributes:
      tokens: int32 [n], prompts and answers; the pad id at image positions.
      is_text: bool [n], False at image positions.
      cache: keys and values of the first `cached` tokens; None before the first turn. It is used up
        by the next turn: a conversation can be continued once.
      cached: tokens that the cache holds.
      turns: answers so far.
    """

    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    is_text: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, bool))
    cache: KVCache | None = None
    cached: int = 0
    turns: int = 0


class Answer:
    """An answer on its way: iterate over it once, for pieces of text as they come.

    Attributes:
      text: the pieces so far.
      new_tokens: tokens so far, without the stop token.
      stopped: whether a stop token ended it; False while it is not complete.
    """

    def __init__(self, pieces: Callable[[Answer], Iterator[str]], asked: Conversation):
        self._pieces, self._asked = pieces(self), asked
        self.text, self.stopped = "", False
        self.new_tokens: list[int] = []
        self.cache: KVCache | None = None

    def __iter__(self) -> Iterator[str]:
        for piece in self._pieces:
            self.text += piece
            yield piece

    @property
    def conversation(self) -> Conversation:
        """The conversation with this answer, which may have been left before its end.

        Raises:
          ValueError: nothing of the answer has been taken yet.
        """
        if self.cache is None:
            raise ValueError("the answer has not begun: iterate over it first")
        added = np.array(self.new_tokens, np.int32)
        asked = self._asked
        return Conversation(
            tokens=np.concatenate([asked.tokens, added]),
            is_text=np.concatenate([asked.is_text, np.ones(len(added), bool)]),
            cache=self.cache, cached=int(self.cache.lengths[0]), turns=asked.turns + 1,
        )  # fmt: skip


class Chat:
    """A trained model to talk to.

    Args:
      weights: of `vlm.specs(run.model)`, or of a language model alone its "decoder" part. The
        decoder's blocks are copied into the layout that decodes fastest.
      run: the run they belong to; its template, system text, tokenizer, tiling and layout apply.
      stop: further tokens that end an answer, beside the template's own end of turn.

    Raises:
      ValueError: the tokenizer is missing, or lacks a token of the template.
    """

    def __init__(self, weights: Tree, run: RunConfig, *, stop: Sequence[int] = ()):
        decoder = decoding.prepare(
            weights["decoder"], run.model.decoder, rows=1, dtype=run.model.dtype
        )
        self.weights: Tree = {**weights, "decoder": decoder}
        self.run = run
        self.tokenizer = tokenizers.load(run.data.tokenizer)
        data = dataclasses.replace(
            run.data, sources=(), seq_len=2**30, tiles_per_group=2**20, batch_size=1,
            tile_groups=1, on_unreadable_image="raise", on_invalid_record="raise",
            on_overlong="raise", on_too_many_tiles="raise",
        )  # fmt: skip
        planner = Planner(data, side=run.token_side, tokenizer=self.tokenizer)
        self._maker = ExampleMaker(planner)
        self.stop = (stop_token(run, self.tokenizer), *stop)

    @property
    def sees_images(self) -> bool:
        """Whether the weights hold a vision tower."""
        return "vision" in self.weights

    def ask(
        self,
        past: Conversation,
        question: str,
        images: Sequence[ImageLike] = (),
        *,
        sampling: SamplingConfig = _GREEDY,
        seed: int = 0,
        count: int = 4,
    ) -> Answer:
        """The answer to one more question, to be iterated over.

        Args:
          past: the conversation so far; `Conversation()` opens one.
          question: its text. `<image>` marks an image's place; images without a mark come first.
          images: files, or Pillow images. How many tiles each gets depends on how many images this
            question has.
          sampling: how tokens are chosen. `prefill_chunk` has no effect: chunks are of 128.
          seed: seed of the draws, together with the number of the turn.
          count: tokens between two pieces.

        Raises:
          PromptTooLongError: conversation, question and max_new_tokens exceed max_length.
          ValueError: an image cannot be read, or the model has no vision tower.
        """
        self.check_images(images)
        turn = self.make_turn(past, question, images)
        tokens = np.concatenate([past.tokens, turn.tokens])
        is_text = np.concatenate([past.is_text, turn.image_index == engine.TEXT])
        self._check_room(len(tokens), int((~is_text).sum()), sampling)
        asked = dataclasses.replace(past, tokens=tokens, is_text=is_text)
        return Answer(
            lambda answer: self._pieces(answer, asked, turn, sampling, seed, count), asked
        )

    def _pieces(
        self,
        answer: Answer,
        asked: Conversation,
        turn: Example,
        how: SamplingConfig,
        seed: int,
        count: int,
    ) -> Iterator[str]:
        model, stop = self.run.model, self.stop
        pending = engine.Pending.of(asked.tokens, asked.cached, turn)
        cache = engine.room_for(asked.cache, len(asked.tokens) + how.max_new_tokens, model)
        hidden, cache = engine.read(self.weights, pending, cache, model)
        key = jax.random.fold_in(jax.random.key(seed), asked.turns)
        seen = engine.seen(asked.tokens, asked.is_text, model, how)
        state = engine.begin(
            self.weights, hidden, cache, key, cfg=model, sampling=how, stop=stop, seen=seen
        )
        text = TextStream(self.tokenizer)
        follow = generate.follow(
            self.weights, state, key, cfg=model, sampling=how, stop=stop, count=count
        )
        for state, tokens in follow:
            fresh = [int(t) for t in tokens[0] if t != generate.NOTHING]
            answer.new_tokens += fresh
            answer.cache, answer.stopped = state.cache, bool(state.done[0])
            if piece := text.push(fresh):
                yield piece
        if piece := text.finish():
            yield piece

    def check_images(self, images: Sequence[ImageLike]) -> None:
        """Raises ValueError if the model sees no images, or the header of one cannot be read."""
        if images and not self.sees_images:
            raise ValueError(
                f"{len(images)} image(s) given, but these weights hold no vision tower: they were "
                "imported with a language model alone"
            )
        for image in images:
            if not isinstance(image, Image.Image):
                path = os.path.expanduser(os.fspath(image))
                image_files.read_size(path, self._maker.planner.limits)

    def make_turn(
        self, past: Conversation, question: str, images: Sequence[ImageLike] = ()
    ) -> Example:
        """The positions that a question adds: the end of the last answer, the question, the marker.

        They are cut from the prompt of a record whose earlier turns are blank, so that the planner
        of training makes them.
        """
        marked = conversation.mark_images(question, len(images))
        blank = [{"from": "human", "value": ""}, {"from": "gpt", "value": ""}] * past.turns
        with tempfile.TemporaryDirectory() as folder:
            files = [_as_file(image, Path(folder) / f"{i}.png") for i, image in enumerate(images)]
            whole = self._prompt([*blank, {"from": "human", "value": marked}], files)
        if not past.turns:
            return whole
        template = conversation.get_template(self.run.data.template)
        around = template.answer.split("{text}")  # The model writes it, around its answer.
        extra = sum(len(self.tokenizer.encode_template(part)) for part in around)
        start = self._prompt(blank[:-1], []).length + extra
        return _from(whole, start)

    def _prompt(self, turns: list[dict[str, str]], files: list[str]) -> Example:
        record = {"id": "question", "image": files}
        record["conversations"] = [*turns, {"from": "gpt", "value": ""}]
        source = SourceConfig(path="chat", image_root="/")
        made = self._maker.make_prompt(record, source, "chat")
        if not isinstance(made, Example):
            raise ValueError(made.detail)
        return made

    def _check_room(self, positions: int, of_images: int, how: SamplingConfig) -> None:
        longest = self.run.model.decoder.max_length
        room = longest - how.max_new_tokens
        if positions > room:
            raise PromptTooLongError(
                f"the prompt takes {positions} positions ({of_images} of images); max_length = "
                f"{longest} leaves {room} before {how.max_new_tokens} new tokens. Shorten it, use "
                "fewer or smaller images, lower SamplingConfig.max_new_tokens, or start a new chat"
            )


def stop_token(run: RunConfig, tokenizer: tokenizers.Tokenizer) -> int:
    """The token that ends an answer in the run's template.

    Raises:
      ValueError: the template ends answers with something that is not one token.
    """
    template = conversation.get_template(run.data.template)
    found = conversation.end_of_turn_id(template, tokenizer)
    if found is None:
        raise ValueError(
            f"template {run.data.template!r} ends an answer with {template.end_of_turn!r}, which is "
            "not one token of this tokenizer"
        )
    return found


def _as_file(image: ImageLike, path: Path) -> str:
    """An image as a path below '/': a Pillow image is written to `path`, without loss."""
    if isinstance(image, Image.Image):
        image.save(path)
        image = path
    return str(Path(image).expanduser().absolute().relative_to("/"))


def _from(example: Example, start: int) -> Example:
    """The positions of an example from `start` on; its tiles stay as they are."""
    corners = example.corner_index, example.corner_weights
    index, weights = (None if each is None else each[start:] for each in corners)
    return dataclasses.replace(
        example, tokens=example.tokens[start:], supervised=example.supervised[start:],
        image_index=example.image_index[start:], corner_index=index, corner_weights=weights,
    )  # fmt: skip
