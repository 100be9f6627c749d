"""Text in any installed face as images: lines, right-to-left, Chinese and Japanese breaking."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from bluelm_jax.data.rendering import corpus, font_index, looks, scripts, text_block
from bluelm_jax.data.rendering.sampling import Drop, Sample, ask, encode

# Draws of another passage before a sample is given up.
_ATTEMPTS = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextConfig:
    """How text images vary.

    Attributes:
      sizes: range of the font size in pixels, drawn log-uniformly.
      aspects: range of width over height that a text block aims at, log-uniformly.
      max_lines: most lines of a passage in one image.
      max_chars: most characters in one image.
      max_side: longest side in pixels; text that does not fit gets a smaller size.
      noise: see `looks.sample`, 0..1.
    """

    sizes: tuple[int, int] = (14, 40)
    aspects: tuple[float, float] = (0.5, 5.0)
    max_lines: int = 5
    max_chars: int = 400
    max_side: int = 1536
    noise: float = 1.0

    def __post_init__(self) -> None:
        if not 6 <= self.sizes[0] <= self.sizes[1] <= 400:
            raise ValueError(f"sizes {self.sizes}: must rise within 6..400 pixels")
        if not 0 < self.aspects[0] <= self.aspects[1]:
            raise ValueError(f"aspects {self.aspects}: must rise and be positive")
        if self.max_lines < 1 or self.max_chars < 1:
            raise ValueError(f"max_lines {self.max_lines}, max_chars {self.max_chars}: at least 1")
        if self.max_side < 8 * self.sizes[0]:
            raise ValueError(f"max_side {self.max_side}: must be 8 x sizes[0] or more")
        if not 0 <= self.noise <= 1:
            raise ValueError(f"noise {self.noise}: must lie in 0..1")


class TextTask:
    """Draws passages of a corpus. See `sampling.Task`."""

    kind = "text"

    def __init__(
        self,
        passages: tuple[corpus.Passage, ...],
        index: font_index.FontIndex,
        cfg: TextConfig,
        prepared: dict[str, dict[str, Any]],
        shaping: bool,
    ):
        self._passages, self._index, self._cfg = passages, index, cfg
        self._prepared, self._shaping = prepared, shaping

    def settings(self) -> dict[str, Any]:
        """See `sampling.Task`."""
        return {
            **dataclasses.asdict(self._cfg),
            "text": corpus.digest(self._passages),
            "faces": self._index.digest(),
            "shaping": self._shaping,
        }

    def licences(self) -> dict[str, str]:
        """See `sampling.Task`."""
        return self._index.licences()

    def prepared(self) -> dict[str, dict[str, Any]]:
        """See `sampling.Task`."""
        return self._prepared

    def sample(self, rng: np.random.Generator, index: int) -> Sample | Drop:
        """See `sampling.Task`."""
        drop = Drop("no text could be drawn", f"sample {index}")
        for _ in range(_ATTEMPTS):
            passage = self._passages[rng.integers(len(self._passages))]
            paragraphs = self._excerpt(rng, passage)
            text = "\n".join(paragraphs)
            faces = self._index.numbers(text, passage.language)
            if faces:
                face = self._index.faces[choose_face(rng, self._index, faces)]
                return self._draw(rng, paragraphs, passage.language, face)
            missing = self._index.uncovered(text)
            shown = " ".join(f"U+{ord(char):04X}" for char in missing[:5]) or "in one face"
            drop = Drop("no face covers the characters", f"{passage.name}: {shown}")
        return drop

    def _excerpt(self, rng: np.random.Generator, passage: corpus.Passage) -> list[str]:
        """Neighbouring lines of a passage; half of the time they run on as one paragraph."""
        lines = passage.lines
        first = int(rng.integers(len(lines)))
        wanted = int(rng.integers(1, self._cfg.max_lines + 1))
        taken, chars = [lines[first]], len(lines[first])
        for line in lines[first + 1 : first + wanted]:
            chars += len(line)
            if chars > self._cfg.max_chars:
                break
            taken.append(line)
        if rng.random() < 0.5:
            spaceless = passage.language.split("-")[0].lower() in ("zh", "ja")
            return [("" if spaceless else " ").join(taken)]
        return taken

    def _draw(
        self,
        rng: np.random.Generator,
        paragraphs: list[str],
        language: str,
        face: font_index.Face,
    ) -> Sample:
        cfg = self._cfg
        shaped = any(map(scripts.needs_shaping, paragraphs))
        size = round(math.exp(rng.uniform(*np.log(cfg.sizes))))
        aspect = math.exp(rng.uniform(*np.log(cfg.aspects)))
        spacing = rng.uniform(1.0, 1.5)
        look = looks.sample(rng, cfg.noise, text_px=size)
        align = "start" if rng.random() < 0.8 else ("centre" if rng.random() < 0.8 else "end")
        margin = int(rng.integers(4, 5 + size))
        while True:
            setter = text_block.Setter(face, size, shaped)
            width = setter.block_width(paragraphs, aspect * spacing)
            width = min(width, cfg.max_side * 0.9 - 2 * margin)
            mask = setter.draw(paragraphs, width, spacing=spacing, margin=margin, align=align)
            if max(mask.size) <= 0.95 * cfg.max_side or size <= cfg.sizes[0]:
                break
            size = max(cfg.sizes[0], int(size * 0.8))
        page = looks.finish(looks.colourise(mask, look), look)
        image, suffix = encode(page, look.jpeg_quality)
        return Sample(
            image=image,
            suffix=suffix,
            width=page.width,
            height=page.height,
            prompt=ask(rng, corpus.instructions("text", language)),
            answer="\n".join(paragraphs),
            meta={"language": language, "fonts": [face.name], "size_px": size, **look.meta()},
        )


def choose_face(
    rng: np.random.Generator, index: font_index.FontIndex, numbers: tuple[int, ...]
) -> int:
    """Chooses a family, then one of its faces: a family of many styles is not seen more often."""
    families = index.families(numbers)
    members = families[rng.integers(len(families))]
    return members[rng.integers(len(members))]
