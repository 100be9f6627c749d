"""What every kind of rendered data has in common: samples, their records, what was left out."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np
from PIL import Image

# Names kept of each reason, so that a manifest stays small whatever goes wrong.
MAX_NAMES = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One image with its question and answer.

    Attributes:
      image: the encoded file.
      suffix: `.png` or `.jpg`.
      width: pixels.
      height: pixels.
      prompt: the human turn, `<image>` in it.
      answer: the model's turn.
      meta: about the sample, not for the conversation: language, fonts, what was done to it.
    """

    image: bytes
    suffix: str
    width: int
    height: int
    prompt: str
    answer: str
    meta: Mapping[str, Any]

    def record(self, identity: str, image: str) -> dict[str, Any]:
        """The LLaVA record, with width, height and meta besides."""
        return {
            "id": identity,
            "image": image,
            "conversations": [
                {"from": "human", "value": self.prompt},
                {"from": "gpt", "value": self.answer},
            ],
            "width": self.width,
            "height": self.height,
            "meta": dict(self.meta),
        }


@dataclasses.dataclass(frozen=True)
class Drop:
    """A sample that could not be drawn: why, and what it was."""

    reason: str
    name: str


class Drops:
    """Counts of what was left out by reason, with the first names of each."""

    def __init__(self, counted: Mapping[str, Mapping[str, Any]] | None = None):
        self._counts: dict[str, int] = {}
        self._names: dict[str, list[str]] = {}
        self.merge(counted or {})

    def add(self, reason: str, name: str) -> None:
        """Counts one."""
        self.merge({reason: {"count": 1, "names": [name]}})

    def merge(self, counted: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds what another's `to_plain` says; the order of merging decides which names stay."""
        for reason, entry in counted.items():
            self._counts[reason] = self._counts.get(reason, 0) + entry["count"]
            names = self._names.setdefault(reason, [])
            fresh = (name for name in entry["names"] if name not in names)
            names += list(fresh)[: MAX_NAMES - len(names)]

    def to_plain(self) -> dict[str, dict[str, Any]]:
        """{reason: {"count": n, "names": [...]}}, in the order of reasons."""
        return {
            reason: {"count": self._counts[reason], "names": list(self._names[reason])}
            for reason in sorted(self._counts)
        }

    def summary(self) -> str:
        """One line a reason."""
        lines = (
            f"{count} x {reason} ({'; '.join(self._names[reason][:3])})"
            for reason, count in sorted(self._counts.items())
        )
        return "\n".join(lines) or "nothing was left out"


@runtime_checkable
class Task(Protocol):
    """Draws the samples of one kind. Pickles, because workers get it once when they start."""

    kind: str

    def sample(self, rng: np.random.Generator, index: int) -> Sample | Drop:
        """Sample `index`, a function of the random numbers and the index alone."""
        ...

    def settings(self) -> dict[str, Any]:
        """Everything the samples depend on besides seed and index, as plain JSON values."""
        ...

    def licences(self) -> dict[str, str]:
        """What each font that may be used says of its licence, by the names in `meta`."""
        ...

    def prepared(self) -> dict[str, dict[str, Any]]:
        """What was left out before any sample was drawn, as `Drops.to_plain` says it."""
        ...


def ask(rng: np.random.Generator, questions: list[str]) -> str:
    """Chooses a question and puts the image before or, one time in four, behind it."""
    question = questions[rng.integers(len(questions))]
    return f"{question}\n<image>" if rng.random() < 0.25 else f"<image>\n{question}"


def encode(image: Image.Image, jpeg_quality: int | None) -> tuple[bytes, str]:
    """Returns the image file and its suffix: JPEG at a quality, or PNG where that is None.

    PNG at level 1: level 6 takes several times as long and saves little on text.
    """
    buffer = io.BytesIO()
    if jpeg_quality is None:
        image.save(buffer, "PNG", compress_level=1)
        return buffer.getvalue(), ".png"
    image.save(buffer, "JPEG", quality=jpeg_quality)
    return buffer.getvalue(), ".jpg"
