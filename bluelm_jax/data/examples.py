"""A record becomes an example, by the policies of a config for samples that do not fit.

A `Plan` is made first, so over-long samples are dropped before a pixel is decoded. What a policy
leaves out comes back as `Skipped`, with the reason to count and the sample's name.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np

from bluelm_jax import patching
from bluelm_jax.data import images
from bluelm_jax.data.plans import Planner, UnreadableImageError
from bluelm_jax.data.sample_plan import ImageSpan, Plan, truncate
from bluelm_jax.data.sources import InvalidRecordError, Records
from bluelm_jax.data_config import DataConfig, SourceConfig

_T = TypeVar("_T")

# Reasons for which samples are left out; other events are of samples that are used.
LEFT_OUT = ("invalid_record", "overlong", "too_many_tiles", "unreadable_image")


class OverlongError(ValueError):
    """A sample with more positions than a row; the message names it and both numbers."""

    kind = "overlong"


class TooManyTilesError(ValueError):
    """A sample with more tiles than a group; the message names it and both numbers."""

    kind = "too_many_tiles"


@dataclasses.dataclass(frozen=True, eq=False)
class Example:
    """A sample, ready to be put in a row.

    Attributes:
      name: the sample's id and where it stands.
      tokens: int32 [n]; the pad id at image positions.
      supervised: bool [n]; True where the token is a target.
      image_index: int32 [n]; >= 0 counts the tokens of the sample's own views, -1 text, -2 newline.
      tiles: uint8 [V, S, S, 3].
      reference: text of the answer that a prompt asks for; '' in training.
      corner_index, corner_weights: [n, 4] or None, for layouts that resize token maps (`Batch`).
      events: (reason, detail) pairs to count.
      images: where each image stands, in the process that made the example; () in others.
    """

    name: str
    tokens: np.ndarray
    supervised: np.ndarray
    image_index: np.ndarray
    tiles: np.ndarray
    reference: str = ""
    events: tuple[tuple[str, str], ...] = ()
    corner_index: np.ndarray | None = None
    corner_weights: np.ndarray | None = None
    images: tuple[ImageSpan, ...] = ()

    @property
    def length(self) -> int:
        """Positions that the sample takes."""
        return len(self.tokens)

    @property
    def num_views(self) -> int:
        """Tiles that the sample takes."""
        return len(self.tiles)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        arrays = (self.tokens, self.supervised, self.image_index, self.tiles)
        corners = (self.corner_index, self.corner_weights)
        return sum(array.nbytes for array in (*arrays, *corners) if array is not None)


@dataclasses.dataclass(frozen=True)
class Skipped:
    """A sample that a policy leaves out.

    Attributes:
      reason: the counter.
      detail: what was wrong with which sample.
      kind: the defect, one of `findings.KINDS`.
      place: where in the sample, such as 'turn 2'; '' where it is the sample as a whole.
    """

    reason: str
    detail: str
    kind: str = ""
    place: str = ""


class ExampleMaker:
    """Makes examples of records.

    Args:
      planner: plans the sequences.
      config: bounds and policies, where they are not those of the planner's config.
    """

    def __init__(self, planner: Planner, config: DataConfig | None = None):
        self.planner = planner
        self.config = planner.config if config is None else config

    def plan_by_policy(
        self, record: Mapping[str, Any], source: SourceConfig, where: str, *, prompt: bool = False
    ) -> Plan:
        """`plan`, without images if one is unreadable and the policy says so.

        With `prompt`, what stands before the last answer, which must have text.
        """
        plan = self.planner.plan
        if prompt:
            plan = functools.partial(self.planner.plan_prompt, answered=True)
        try:
            return plan(record, source, where)
        except UnreadableImageError as error:
            if self.config.on_unreadable_image != "replace_with_text_only":
                raise
            event = ("replaced_with_text_only", str(error))
            planned = plan(record, source, where, with_images=False)
            return dataclasses.replace(planned, events=(*planned.events, event))

    def of_record(
        self,
        make: Callable[[Mapping[str, Any], SourceConfig, str], _T | Skipped],
        records: Records,
        index: int,
        source: SourceConfig,
    ) -> _T | Skipped:
        """What `make` (a method of this object) makes of record `index`, which may not parse.

        What a policy raises for says in its message how to leave such samples out.
        """
        try:
            return self._apply_policies(lambda: make(records[index], source, records.where(index)))
        except _REFUSALS as error:
            advise(error)
            raise

    def make(
        self, record: Mapping[str, Any], source: SourceConfig, where: str
    ) -> Example | Skipped:
        """A training example, or why a policy leaves the sample out; errors if none does."""
        return self._apply_policies(lambda: self._make(record, source, where))

    def make_plan(
        self, record: Mapping[str, Any], source: SourceConfig, where: str
    ) -> Plan | Skipped:
        """`make` as far as it goes without decoding an image."""
        return self._apply_policies(lambda: self._fit(self.plan_by_policy(record, source, where)))

    def make_prompt(
        self,
        record: Mapping[str, Any],
        source: SourceConfig,
        where: str,
        *,
        turn: int = -1,
        answered: bool = False,
        new_tokens: int = 0,
    ) -> Example | Skipped:
        """A prompt without its answer, and the answer as `reference`.

        The policies are those of training, but nothing is truncated: a question without its end
        asks for nothing. 'truncate_text' raises for a prompt that is too long. With `answered`, a
        record whose answer has no text is invalid. `new_tokens` are those that `seq_len` leaves
        free behind a prompt, for the message.
        """

        def plan(with_images: bool) -> Plan:
            planned = self.planner.plan_prompt(
                record, source, where, turn=turn, with_images=with_images, answered=answered
            )
            if planned.length > self.config.seq_len:
                raise OverlongError(_too_long(planned, self.config.seq_len, new_tokens))
            return planned

        return self._apply_policies(lambda: self._with_pixels(plan))

    def _make(self, record, source: SourceConfig, where: str) -> Example | Skipped:
        return self._with_pixels(
            lambda images: self._fit(self.planner.plan(record, source, where, with_images=images))
        )

    def _with_pixels(self, plan: Callable[[bool], Plan | Skipped]) -> Example | Skipped:
        """`plan(True)` with its pixels, or `plan(False)` if an image is bad and policy says so."""
        event = None
        try:
            planned = plan(True)
            made = planned if isinstance(planned, Skipped) else self._decode(planned)
        except UnreadableImageError as error:  # In its header, or behind a good one.
            if self.config.on_unreadable_image != "replace_with_text_only":
                raise
            event = ("replaced_with_text_only", str(error))
            planned = plan(False)
            made = planned if isinstance(planned, Skipped) else self._decode(planned)
        if event is None or isinstance(made, Skipped):
            return made
        return dataclasses.replace(made, events=(*made.events, event))

    def _fit(self, plan: Plan) -> Plan | Skipped:
        """`plan` within the bounds of a row and a group, by policy."""
        config = self.config
        if plan.length > config.seq_len:
            if config.on_overlong != "truncate_text":
                raise OverlongError(_too_long(plan, config.seq_len))
            plan = truncate(plan, config.seq_len)
            if not plan.supervised.any():
                detail = f"{plan.name}: no supervised token among the first {config.seq_len}"
                return Skipped("overlong", detail, "overlong")
        if plan.num_views > config.tiles_per_group:
            raise TooManyTilesError(
                f"{plan.name}: {plan.num_views} tiles, tiles_per_group = {config.tiles_per_group}"
            )
        return plan

    def _apply_policies(self, build: Callable[[], _T | Skipped]) -> _T | Skipped:
        config = self.config
        try:
            return build()
        except InvalidRecordError as error:
            caught, reason, policy = error, "invalid_record", config.on_invalid_record
        except OverlongError as error:
            caught, reason, policy = error, "overlong", config.on_overlong
        except TooManyTilesError as error:
            caught, reason, policy = error, "too_many_tiles", config.on_too_many_tiles
        except UnreadableImageError as error:
            caught, reason, policy = error, "unreadable_image", config.on_unreadable_image
        if policy not in ("skip", "drop"):
            raise caught
        return Skipped(reason, str(caught), *_kind_and_place(caught))

    def _decode(self, plan: Plan) -> Example:
        """Adds the views of a plan's images."""
        size = self.config.tiling.tile_size
        views = [np.zeros((0, size, size, 3), np.uint8)]
        for span in plan.images:
            try:
                image = images.read_image(span.file, self.planner.limits)
            except images.ImageError as error:
                raise UnreadableImageError(f"{plan.name}: {error}") from error
            if image.size != (span.width, span.height):
                found = f"decoded to {image.width}x{image.height}"
                wanted = f"the header says {span.width}x{span.height}"
                file = images.file_name(span.file)
                raise UnreadableImageError(f"{plan.name}: {file}: {found}, {wanted}")
            views.append(patching.make_views(image, plan.tiling, plan.num_images))
        return Example(
            name=plan.name,
            tokens=plan.tokens,
            supervised=plan.supervised,
            image_index=plan.image_index,
            tiles=np.concatenate(views),
            reference=plan.reference,
            events=plan.events,
            corner_index=plan.corner_index,
            corner_weights=plan.corner_weights,
            images=plan.images,
        )


def _kind_and_place(error: Exception) -> tuple[str, str]:
    """The defect behind an error, and where in the sample it is."""
    if isinstance(error, UnreadableImageError):
        return f"image_{getattr(error.__cause__, 'kind', 'damaged')}", ""
    return getattr(error, "kind", ""), getattr(error, "place", "")


_REFUSALS = (InvalidRecordError, OverlongError, TooManyTilesError, UnreadableImageError)
_POLICIES = ("on_invalid_record = 'skip'", "on_overlong = 'drop'", "on_too_many_tiles = 'skip'")


def advise(error: Exception) -> None:
    """Adds to the message of a sample's error which policy leaves such samples out."""
    pairs = zip(_REFUSALS, (*_POLICIES, "on_unreadable_image = 'skip'"), strict=True)
    policy = next(text for kind, text in pairs if isinstance(error, kind))
    hint = f"DataConfig.{policy} leaves such samples out"
    error.args = (f"{error} ({hint}; python -m experiments.validate_data lists all of them)",)


def _too_long(plan: Plan, limit: int, new_tokens: int = 0) -> str:
    image_tokens = sum(span.stop - span.start for span in plan.images)
    if new_tokens:
        return (
            f"{plan.name}: prompt of {plan.length} positions ({image_tokens} of images) + "
            f"{new_tokens} new tokens exceeds max_length = {limit + new_tokens}"
        )
    return f"{plan.name}: {plan.length} positions ({image_tokens} of images), seq_len = {limit}"
