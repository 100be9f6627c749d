"""What a record becomes, without its pixels, and how it is cut to a length."""

from __future__ import annotations

import dataclasses

import numpy as np

from bluelm_jax import schemes
from bluelm_jax.data.image_bytes import ImageFile


@dataclasses.dataclass(frozen=True, eq=False)
class ImageSpan:
    """One image of a sample: its file, upright size, positions [start, stop) and views."""

    file: ImageFile
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
      tiling: how the images are cut.
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
    tiling: schemes.Tiling
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
