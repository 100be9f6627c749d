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
from bluelm_jax.data import conversation, images
from bluelm_jax.data import tokenizer as tokenizers
from bluelm_jax.data.conversation import Segment
from bluelm_jax.data.sources import InvalidRecordError, image_files, sample_name
from bluelm_jax.data_config import DataConfig, SourceConfig


class UnreadableImageError(ValueError):
    """An image that cannot be read; the message names sample, file and cause."""


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSpan:
    """One image of a sample: its file, upright size, positions [start, stop) and views."""

    path: str
    width: int
    height: int
    start: int
    stop: int
    num_views: int


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """A sample without its pixels.

    Attributes:
      name: the sample's id and where it stands, for messages.
      tokens: int32 [n]; the pad id at image positions.
      supervised: bool [n].
      image_index: int32 [n]; >= 0 counts the tokens of the sample's own views.
      images: where each image stands.
      num_images: images of the record; schemes give each of several images fewer tiles.
      reference: text of the answer that a prompt asks for.
      corner_index, corner_weights: [n, 4] or None, for layouts that resize token maps (`Batch`).
      events: (reason, detail) pairs to count.
    """

    name: str
    tokens: np.ndarray
    supervised: np.ndarray
    image_index: np.ndarray
    images: tuple[ImageSpan, ...]
    num_images: int
    reference: str = ""
    events: tuple[tuple[str, str], ...] = ()
    corner_index: np.ndarray | None = None
    corner_weights: np.ndarray | None = None

    @property
    def length(self) -> int:
        """Positions that the sample takes."""
        return len(self.tokens)

    @property
    def num_views(self) -> int:
        """Tiles that the sample takes."""
        return sum(span.num_views for span in self.images)


class Planner:
    """Plans samples by the templates, tiling and layout of a config.

    Args:
      config: the data config.
      side: tokens along one side of a view (`layout.view_side` of the model's numbers).
      tokenizer: the tokenizer; None loads the config's.

    Raises:
      ValueError: a template or the layout needs a token that the tokenizer lacks.
    """

    def __init__(
        self, config: DataConfig, *, side: int, tokenizer: tokenizers.Tokenizer | None = None
    ):
        self.config, self.side = config, side
        self.tokenizer = tokenizers.load(config.tokenizer) if tokenizer is None else tokenizer
        self.limits = images.ImageLimits(
            max_megapixels=config.max_megapixels, max_aspect_ratio=config.max_aspect_ratio
        )
        names = {config.template} | {s.template for s in config.sources if s.template}
        tags = self._layout_tags()
        for name in sorted(names):
            template = conversation.get_template(name)
            conversation.check_tokens(template, self.tokenizer, tags)
            if config.system and template.system is None:
                raise ValueError(f"DataConfig.system: template {name!r} has no place for it")

    def _layout_tags(self) -> list[str]:
        """Vocabulary tokens that the layout uses, from an image of one view and one of several."""
        size = self.config.tiling.tile_size
        found = (self._layout(size * k, size * k, 1).text for k in (1, 3))
        return sorted({tag for text in found for tag in text})

    def _layout(self, width: int, height: int, num_images: int) -> layouts.ImageLayout:
        config = self.config
        return layouts.image_layout(
            width, height, config.tiling, config.layout, self.side, num_images
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
        files = _check_images(record, turns, name)
        if not with_images:
            segments = [segment for segment in segments if segment.kind != "image"]
        plan = _named(name, self._plan_segments, name, files, segments, source)
        if not plan.supervised.any():
            raise InvalidRecordError(f"{name}: no token of the sample is supervised")
        if left_out:
            event = ("leading_turns_left_out", f"{name}: {left_out}")
            plan = dataclasses.replace(plan, events=(*plan.events, event))
        return plan

    def plan_prompt(
        self, record: Mapping[str, Any], source: SourceConfig, where: str, *, turn: int = -1
    ) -> Plan:
        """The sequence up to the marker of one answer, and that answer as `reference`.

        `turn` picks among the assistant turns; images of later turns are left out.
        """
        name = sample_name(record, where)
        turns, _ = conversation.read_turns(record, name)
        template = conversation.get_template(source.template or self.config.template)
        segments, reference = _named(
            name, conversation.render_prompt, turns, template, system=self.config.system, turn=turn
        )
        files = _check_images(record, turns, name)
        plan = _named(name, self._plan_segments, name, files, segments, source)
        return dataclasses.replace(plan, reference=reference)

    def _plan_segments(
        self,
        name: str,
        files: Sequence[str],
        segments: Sequence[Segment],
        source: SourceConfig,
    ) -> Plan:
        parts: list[tuple[np.ndarray, np.ndarray, bool]] = []  # ids, image index, supervised
        spans: list[ImageSpan] = []
        blends: list[tuple[int, int, layouts.ImageLayout]] = []  # first position, first view
        at = views = 0
        for segment in segments:
            if segment.kind == "image":
                try:
                    path, width, height = self._find_image(source, files[len(spans)])
                except images.ImageError as error:
                    raise UnreadableImageError(f"{name}: {error}") from error
                layout = self._layout(width, height, len(files))
                parts.append((*self._image_tokens(layout, views), False))
                blends.append((at, views, layout))
                stop = at + layout.num_tokens
                spans.append(ImageSpan(path, width, height, at, stop, layout.num_views))
                views += layout.num_views
            else:
                ids = self._ids(segment)
                parts.append((ids, np.full(len(ids), layouts.TEXT), segment.supervised))
            at += len(parts[-1][0])
        supervised = np.concatenate([np.full(len(p[0]), p[2], bool) for p in parts])
        supervised[:1] = False  # Nothing stands before it to predict it from.
        image_index = np.concatenate([p[1] for p in parts]).astype(np.int32)
        corner_index, corner_weights = self._corners(image_index, blends)
        return Plan(
            name=name,
            tokens=np.concatenate([p[0] for p in parts]).astype(np.int32),
            supervised=supervised,
            image_index=image_index,
            images=tuple(spans),
            num_images=len(files),
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
                index[span] = layout.corner_index + first_view * self.side**2
                weights[span] = layout.corner_weights
        return index, weights

    def _ids(self, segment: Segment) -> np.ndarray:
        match segment.kind:
            case "bos":
                ids = [self.tokenizer.bos_id]
            case "eos":
                ids = [self.tokenizer.eos_id]
            case "template":
                ids = self.tokenizer.encode_template(segment.text)
            case _:
                ids = self.tokenizer.encode(segment.text)
        return np.asarray(ids, np.int32)

    def _find_image(self, source: SourceConfig, file: str) -> tuple[str, int, int]:
        """Path, width and height of an image of a source."""
        path = images.resolve_path(source.folder, file)
        return (path, *images.read_size(path, self.limits))

    def _image_tokens(
        self, layout: layouts.ImageLayout, first_view: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids and image index of an image whose views follow `first_view` others."""
        index = layout.index.copy()
        index[index >= 0] += first_view * self.side**2
        ids = np.full(len(index), self.tokenizer.pad_id, np.int32)
        tags = [conversation.single_id(self.tokenizer, tag) for tag in layout.text]
        ids[index == layouts.TEXT] = np.array(tags, np.int32)
        return ids, index


def truncate(plan: Plan, limit: int) -> Plan:
    """The first `limit` positions of a plan, fewer if the cut would fall inside an image."""
    cut = limit
    for span in plan.images:
        if span.start < cut < span.stop:
            cut = span.start
    event = ("truncated", f"{plan.name}: {plan.length} -> {cut} positions")
    return dataclasses.replace(
        plan,
        tokens=plan.tokens[:cut],
        supervised=plan.supervised[:cut],
        image_index=plan.image_index[:cut],
        corner_index=None if plan.corner_index is None else plan.corner_index[:cut],
        corner_weights=None if plan.corner_weights is None else plan.corner_weights[:cut],
        images=tuple(span for span in plan.images if span.stop <= cut),
        events=(*plan.events, event),
    )


def _check_images(
    record: Mapping[str, Any], turns: Sequence[conversation.Turn], name: str
) -> list[str]:
    """The record's image files, as many as its turns ask for."""
    files = image_files(record, name)
    wanted = conversation.count_images(turns)
    if wanted != len(files):
        raise InvalidRecordError(
            f"{name}: {wanted} {conversation.IMAGE} in the turns, {len(files)} images"
        )
    return files


def _named(name: str, render, *args, **kwargs):
    """Calls `render`, with the sample's name in front of its complaint."""
    try:
        return render(*args, **kwargs)
    except InvalidRecordError as error:
        raise InvalidRecordError(f"{name}: {error}") from error
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can spell
        raise InvalidRecordError(f"{name}: text is not Unicode: {error.reason}") from error
