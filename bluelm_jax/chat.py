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
import io
import os
from collections.abc import Generator, Sequence
from pathlib import Path

import jax
import numpy as np
from PIL import ExifTags, Image

from bluelm_jax import chat_engine as engine
from bluelm_jax import decoding, generate, steps
from bluelm_jax.chat_engine import Answer as Answer
from bluelm_jax.chat_engine import Conversation as Conversation
from bluelm_jax.data import conversation
from bluelm_jax.data import images as image_files
from bluelm_jax.data import tokenizer as tokenizers
from bluelm_jax.data.examples import Example, ExampleMaker
from bluelm_jax.data.image_bytes import ImageBytes
from bluelm_jax.data.pixel_modes import to_rgb
from bluelm_jax.data.plans import Planner
from bluelm_jax.data.text_stream import TextStream
from bluelm_jax.data_config import SourceConfig
from bluelm_jax.params import Tree
from bluelm_jax.run_config import RunConfig
from bluelm_jax.sampling import SamplingConfig

ImageLike = str | os.PathLike[str] | Image.Image
_GREEDY = SamplingConfig()


class PromptTooLongError(ValueError):
    """A conversation that the model has no positions for; the message has the numbers."""


class Chat:
    """A trained model to talk to.

    Args:
      weights: of `vlm.specs(run.model)`, or of a language model alone its "decoder" part. The
        decoder's blocks are copied into the layout that decodes fastest.
      run: the run they belong to; its template, system text, tokenizer, tiling and layout apply.
      stop: a token or tokens that end an answer, beside the template's own end of turn.

    Raises:
      ValueError: the tokenizer is missing, or lacks a token of the template; or a stop token is
        none of the vocabulary.
    """

    def __init__(self, weights: Tree, run: RunConfig, *, stop: steps.Stop = ()):
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
        own, vocab_size = stop_token(run, self.tokenizer), run.model.decoder.vocab_size
        self.stop = steps.check_stop((own, *steps.stop_ids(stop)), vocab_size)

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
          ValueError: an image cannot be read, the model has no vision tower, the template has no
            place for the question's text, or `past` cannot be continued (any more).
          TypeError: the question is not a string.
        """
        if not isinstance(question, str):
            raise TypeError(f"a question must be a string, got {type(question)}")
        past.check_usable()
        self.check_images(images)
        turn = self.make_turn(past, question, images)
        tokens = np.concatenate([past.tokens, turn.tokens])
        is_text = np.concatenate([past.is_text, turn.image_index == engine.TEXT])
        self._check_room(len(tokens), int((~is_text).sum()), sampling)
        asked = dataclasses.replace(past, tokens=tokens, is_text=is_text)
        return Answer(
            lambda answer: self._pieces(answer, asked, turn, sampling, seed, count), past, asked
        )

    def _pieces(
        self,
        answer: Answer,
        asked: Conversation,
        turn: Example,
        how: SamplingConfig,
        seed: int,
        count: int,
    ) -> Generator[str, None, None]:
        model, stop = self.run.model, self.stop
        pending = engine.Pending.of(asked.tokens, asked.cached, turn)
        cache = engine.room_for(asked.cache, len(asked.tokens) + how.max_new_tokens, model)
        # Each step uses up the cache before it. `answer` holds the newest from its very start on, so
        # that a step that is broken off while it is waited for costs nothing.
        hidden = None
        for read, answer.cache in engine.read(self.weights, pending, cache, model):
            hidden = read
        if hidden is None:
            raise ValueError("nothing to read: a turn has at least the marker of its answer")
        key = jax.random.fold_in(jax.random.key(seed), asked.turns)
        seen = engine.seen(asked.tokens, asked.is_text, model, how)
        state = engine.begin(
            self.weights, hidden, answer.cache, key, cfg=model, how=how, stop=stop, seen=seen
        )
        answer.cache = state.cache
        text = TextStream(self.tokenizer)
        follow = generate.follow(
            self.weights, state, key, cfg=model, sampling=how, stop=stop, count=count
        )
        for state, tokens, _ in follow:
            answer.cache = state.cache
            fresh = [int(t) for t in np.asarray(tokens)[0] if t != generate.NOTHING]
            answer.take(fresh)
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
        limits = self._maker.planner.limits
        for image in images:
            if isinstance(image, Image.Image):
                size = image_files.upright_size(image, image_files.exif_orientation(image))
                image_files.check_limits(_name(image), size, limits)
            else:
                image_files.read_size(os.path.expanduser(os.fspath(image)), limits)

    def make_turn(
        self, past: Conversation, question: str, images: Sequence[ImageLike] = ()
    ) -> Example:
        """The positions that a question adds: the end of the last answer, the question, the marker.

        They are cut from the prompt of a record whose earlier turns are blank, so that the planner
        of training makes them.
        """
        template = conversation.get_template(self.run.data.template)
        if not template.keep_user_text and question.replace(conversation.IMAGE, "").strip():
            raise ValueError(
                f"template {template.name!r} has no place for the text of a question, only for its "
                "images: ask with images and an empty question, or use a run with another template"
            )
        marked = conversation.mark_images(question, len(images))
        limits = self._maker.planner.limits
        blank = [{"from": "human", "value": ""}, {"from": "gpt", "value": ""}] * past.turns
        files = [_as_file(image, limits) for image in images]
        whole = self._prompt([*blank, {"from": "human", "value": marked}], files)
        if not past.turns:
            return whole
        around = template.answer.split("{text}")  # The model writes it, around its answer.
        extra = sum(len(self.tokenizer.encode_template(part)) for part in around)
        start = self._prompt(blank[:-1], []).length + extra
        return _from(whole, start)

    def _prompt(self, turns: list[dict[str, str]], files: list[str | ImageBytes]) -> Example:
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


def _name(image: Image.Image) -> str:
    """What messages call a Pillow image."""
    return f"a Pillow image of mode {image.mode}"


def _as_file(image: ImageLike, limits: image_files.ImageLimits) -> str | ImageBytes:
    """An image as a path below '/', or a Pillow image as the bytes of a PNG file of it."""
    if not isinstance(image, Image.Image):
        return str(Path(image).expanduser().absolute().relative_to("/"))
    orientation = Image.Exif()  # Before loading, as for files; the reader turns the image.
    orientation[ExifTags.Base.Orientation] = image_files.exif_orientation(image)
    try:
        image.load()
        rgb = to_rgb(image, limits.background)
    except Exception as e:  # As for files: Pillow raises nearly everything.
        raise ValueError(f"{_name(image)}, {image.size}: {e}") from e
    file = io.BytesIO()
    rgb.save(file, "PNG", exif=orientation)
    return ImageBytes(_name(image), file.getvalue())


def _from(example: Example, start: int) -> Example:
    """The positions of an example from `start` on; its tiles stay as they are."""
    corners = example.corner_index, example.corner_weights
    index, weights = (None if each is None else each[start:] for each in corners)
    return dataclasses.replace(
        example, tokens=example.tokens[start:], supervised=example.supervised[start:],
        image_index=example.image_index[start:], corner_index=index, corner_weights=weights,
    )  # fmt: skip
