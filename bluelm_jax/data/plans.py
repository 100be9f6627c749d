"""What a record becomes, without its pixels: token ids, what is supervised, where images stand.

Everything about the sequence follows from the record and the images' header sizes. Labels are built
segment by segment from token ids: supervised are the tokens of an answer and the token that ends
the turn; system and human text, markers, image positions and padding are not. Text is encoded
segment by segment in training and generation alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bluelm_jax import layout as layouts
from bluelm_jax import schemes
from bluelm_jax.data import conversation, images
from bluelm_jax.data import tokenizer as tokenizers
from bluelm_jax.data.conversation import Segment
from bluelm_jax.data.image_bytes import ImageBytes, ImageFile
from bluelm_jax.data.sample_plan import ImageSpan as ImageSpan
from bluelm_jax.data.sample_plan import Plan as Plan
from bluelm_jax.data.sources import InvalidRecordError, image_files, sample_name
from bluelm_jax.data_config import DataConfig, SourceConfig


class UnreadableImageError(ValueError):
    """An image that cannot be read; the message names sample, file and cause."""


class Planner:
    """Plans samples by the templates, tiling and layout of a config.

    Args:
      config: the data config.
      side: tokens along one side of a view, or unordered ones (`layout.token_side` of the model).
      tokenizer: the tokenizer; None loads the config's.

    Raises:
      ValueError: a template or the layout needs a token that the tokenizer lacks.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        side: layouts.Side,
        tokenizer: tokenizers.Tokenizer | None = None,
    ):
        self.config, self.side = config, side
        self._template_ids: dict[str, np.ndarray] = {}
        self.tokenizer = tokenizers.load(config.tokenizer) if tokenizer is None else tokenizer
        self.limits = images.ImageLimits(
            max_megapixels=config.max_megapixels, max_aspect_ratio=config.max_aspect_ratio
        )
        names = {config.template} | {s.template for s in config.sources if s.template}
        tilings = [config.tiling, *(self._tiling(source) for source in config.sources)]
        tags = sorted({tag for tiling in tilings for tag in self._layout_tags(tiling)})
        for name in sorted(names):
            template = conversation.get_template(name)
            conversation.check_tokens(template, self.tokenizer, tags)
            if config.system and template.system is None:
                raise ValueError(f"DataConfig.system: template {name!r} has no place for it")

    def _tiling(self, source: SourceConfig) -> schemes.Tiling:
        return self.config.tiling if source.tiling is None else source.tiling

    def _layout_tags(self, tiling: schemes.Tiling) -> set[str]:
        """Vocabulary tokens that the layout uses, from an image of one view and one of several."""
        size = tiling.tile_size
        found = (self._layout(size * k, size * k, 1, tiling).text for k in (1, 3))
        return {tag for text in found for tag in text}

    def _layout(
        self, width: int, height: int, num_images: int, tiling: schemes.Tiling
    ) -> layouts.ImageLayout:
        return layouts.image_layout(
            width, height, tiling, self.config.layout, self.side, num_images
        )

    def plan(
        self,
        record: Mapping[str, Any],
        source: SourceConfig,
        where: str,
        *,
        with_images: bool = True,
    ) -> Plan:
        """The sequence of a training sample, whatever its length.

        Args:
          record: the record.
          source: the source it comes from.
          where: its place, for messages.
          with_images: False leaves all images out, keeping the text around them.

        Raises:
          InvalidRecordError: the record breaks a rule of `conversation`, or nothing in it is
            supervised.
          UnreadableImageError: the header of an image cannot be read.
        """
        name = sample_name(record, where)
        turns, left_out = conversation.read_turns(record, name)
        template = conversation.get_template(source.template or self.config.template)
        segments = _named(name, conversation.render, turns, template, system=self.config.system)
        files = check_images(record, turns, name)
        if not with_images:
            segments = [segment for segment in segments if segment.kind != "image"]
        plan = _named(name, self._plan_segments, name, files, segments, source)
        if not plan.supervised.any():
            raise InvalidRecordError(f"{name}: no token is supervised", "nothing_supervised")
        if left_out:
            event = ("leading_turns_left_out", f"{name}: {left_out}")
            plan = dataclasses.replace(plan, events=(*plan.events, event))
        return plan

    def plan_prompt(
        self,
        record: Mapping[str, Any],
        source: SourceConfig,
        where: str,
        *,
        turn: int = -1,
        with_images: bool = True,
        answered: bool = False,
    ) -> Plan:
        """The sequence up to the marker of one answer, and that answer as `reference`.

        `turn` picks among the assistant turns; images of later turns are left out.

        Raises:
          InvalidRecordError: as in `plan`; with `answered`, also where the answer has no text.
          UnreadableImageError: the header of an image cannot be read.
        """
        name = sample_name(record, where)
        turns, _ = conversation.read_turns(record, name)
        template = conversation.get_template(source.template or self.config.template)
        segments, reference = _named(
            name, conversation.render_prompt, turns, template, system=self.config.system, turn=turn
        )
        if answered and not reference.replace(conversation.IMAGE, "").strip():
            message = f"{name}: the answer to compare with is empty"
            raise InvalidRecordError(message, "nothing_supervised")
        files = check_images(record, turns, name)
        if not with_images:
            segments = [segment for segment in segments if segment.kind != "image"]
        plan = _named(name, self._plan_segments, name, files, segments, source)
        return dataclasses.replace(plan, reference=reference)

    def _plan_segments(
        self,
        name: str,
        files: Sequence[str | ImageBytes],
        segments: Sequence[Segment],
        source: SourceConfig,
    ) -> Plan:
        parts: list[np.ndarray] = []  # ids of each segment
        maps: list[tuple[int, np.ndarray]] = []  # first position, image index
        spans: list[ImageSpan] = []
        blends: list[tuple[int, int, layouts.ImageLayout]] = []  # first position, first view
        at = views = 0
        tiling = self._tiling(source)
        for segment in segments:
            if segment.kind == "image":
                try:
                    file, width, height = self._find_image(source, files[len(spans)])
                except images.ImageError as error:
                    raise UnreadableImageError(f"{name}: {error}") from error
                layout = self._layout(width, height, len(files), tiling)
                ids, index = self._image_tokens(layout, views)
                parts.append(ids)
                maps.append((at, index))
                blends.append((at, views, layout))
                stop = at + layout.num_tokens
                spans.append(ImageSpan(file, width, height, at, stop, layout.num_views))
                views += layout.num_views
            else:
                parts.append(self._ids(segment))
            at += len(parts[-1])
        supervised = np.repeat([s.supervised for s in segments], [len(p) for p in parts])
        supervised[:1] = False  # Nothing stands before it to predict it from.
        image_index = np.full(at, layouts.TEXT, np.int32)
        for start, index in maps:
            image_index[start : start + len(index)] = index
        corner_index, corner_weights = self._corners(image_index, blends)
        return Plan(
            name=name,
            tokens=np.concatenate(parts),
            supervised=supervised,
            image_index=image_index,
            images=tuple(spans),
            num_images=len(files),
            tiling=tiling,
            corner_index=corner_index,
            corner_weights=corner_weights,
        )

    def _corners(
        self, image_index: np.ndarray, blends: Sequence[tuple[int, int, layouts.ImageLayout]]
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Corners of every position: the token itself, except in maps that were resized."""
        if not layouts.resizes(self.config.layout):
            return None, None
        index = np.repeat(np.maximum(image_index, 0)[:, None], 4, axis=1)
        weights = np.zeros(index.shape, np.float32)
        weights[:, 0] = image_index >= 0
        for at, first_view, layout in blends:
            if layout.corner_index is not None:
                span = slice(at, at + layout.num_tokens)
                index[span] = layout.corner_index + first_view * layouts.tokens_per_view(self.side)
                weights[span] = layout.corner_weights
        return index, weights

    def _ids(self, segment: Segment) -> np.ndarray:
        match segment.kind:
            case "bos":
                ids = [self.tokenizer.bos_id]
            case "eos":
                ids = [self.tokenizer.eos_id]
            case "template":  # The same few texts in every sample.
                if segment.text not in self._template_ids:
                    ids = self.tokenizer.encode_template(segment.text)
                    self._template_ids[segment.text] = np.asarray(ids, np.int32)
                return self._template_ids[segment.text]
            case _:
                ids = self.tokenizer.encode(segment.text)
        return np.asarray(ids, np.int32)

    def _find_image(
        self, source: SourceConfig, file: str | ImageBytes
    ) -> tuple[ImageFile, int, int]:
        """Path or bytes, width and height of an image of a source."""
        found = file if isinstance(file, ImageBytes) else images.resolve_path(source.folder, file)
        return (found, *images.read_size(found, self.limits))

    def _image_tokens(
        self, layout: layouts.ImageLayout, first_view: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and image index of an image whose views follow `first_view` others."""
        index = layout.index.copy()
        index[index >= 0] += first_view * layouts.tokens_per_view(self.side)
        ids = np.full(len(index), self.tokenizer.pad_id, np.int32)
        tags = [conversation.single_id(self.tokenizer, tag) for tag in layout.text]
        ids[index == layouts.TEXT] = np.array(tags, np.int32)
        return ids, index


def check_images(
    record: Mapping[str, Any], turns: Sequence[conversation.Turn], name: str
) -> list[str | ImageBytes]:
    """The record's image files, as many as its turns ask for; else InvalidRecordError."""
    files = image_files(record, name)
    wanted = conversation.count_images(turns)
    if wanted != len(files):
        raise InvalidRecordError(
            f"{name}: {wanted} {conversation.IMAGE} in the turns, {len(files)} images",
            "image_count",
        )
    return files


def _named(name: str, render, *args, **kwargs):
    """Calls `render`, with the sample's name in front of its complaint."""
    try:
        return render(*args, **kwargs)
    except InvalidRecordError as error:
        raise InvalidRecordError(f"{name}: {error}", error.kind, error.place) from error
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        message = f"{name}: text is not Unicode: {error.reason}"
        raise InvalidRecordError(message, "lone_surrogate") from error
