"""Formulas as images, drawn by Matplotlib's mathtext: no TeX is needed."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import logging
import math
import re
from typing import Any

import numpy as np
from matplotlib import mathtext
from matplotlib.font_manager import FontProperties
from PIL import Image, ImageOps

from bluelm_jax.data.rendering import corpus, formula_grammar, looks
from bluelm_jax.data.rendering.sampling import Drop, Drops, Sample, ask, encode

FONT_SETS = ("dejavusans", "dejavuserif", "cm", "stix", "stixsans")
_STIX = "STIX Font License (an early form of the SIL Open Font License)"
LICENCES = {
    "mathtext dejavusans": "DejaVu licence (Bitstream Vera terms)",
    "mathtext dejavuserif": "DejaVu licence (Bitstream Vera terms)",
    "mathtext cm": "BaKoMa fonts licence",
    "mathtext stix": _STIX,
    "mathtext stixsans": _STIX,
}
SUFFIXES = (".txt", ".tex", ".jsonl")
_ATTEMPTS = 20
_DOLLARS = re.compile(r"^(\$\$?|\\\(|\\\[)\s*(.*?)\s*(\$\$?|\\\)|\\\])$", re.DOTALL)


class FormulaError(ValueError):
    """A formula that mathtext cannot draw; the message says why."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FormulaConfig:
    """How formula images vary.

    Attributes:
      sizes: range of the font size in pixels, log-uniform.
      max_depth: see `formula_grammar.formula`.
      max_side: widest image in pixels; wider formulas get a smaller size.
      noise: see `looks.sample`.
    """

    sizes: tuple[int, int] = (16, 48)
    max_depth: int = 3
    max_side: int = 1536
    noise: float = 1.0

    def __post_init__(self) -> None:
        if not 6 <= self.sizes[0] <= self.sizes[1] <= 400:
            raise ValueError(f"sizes {self.sizes}: must rise within 6..400 pixels")
        if self.max_depth < 0 or not 0 <= self.noise <= 1:
            raise ValueError(f"max_depth {self.max_depth} >= 0, noise {self.noise} in 0..1")
        if self.max_side < 8 * self.sizes[0]:
            raise ValueError(f"max_side {self.max_side}: must be 8 x sizes[0] or more")


class _Listener(logging.Handler):
    """Mathtext logs a missing glyph and draws a stand-in; here that is an error."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.heard: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@functools.cache
def _parser() -> tuple[mathtext.MathTextParser, _Listener]:
    listener = _Listener()
    logger = logging.getLogger("matplotlib.mathtext")
    logger.addHandler(listener)
    logger.propagate = False
    return mathtext.MathTextParser("agg"), listener


def draw(formula: str, size: int, font_set: str) -> tuple[Image.Image, int]:
    """Draws a formula.

    Args:
      formula: LaTeX of mathtext's subset, without dollar signs.
      size: font size in pixels.
      font_set: one of `FONT_SETS`.

    Returns:
      Its coverage, mode L, and how many of its rows lie below the baseline.

    Raises:
      FormulaError: if mathtext does not know a command, or has no glyph for a character.
    """
    parser, listener = _parser()
    listener.heard.clear()
    face = FontProperties(size=size, math_fontfamily=font_set)
    try:
        drawn = parser.parse(f"${formula}$", dpi=72, prop=face)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FormulaError(reason[-1]) from error
    if listener.heard:
        raise FormulaError(listener.heard[0])
    image = Image.fromarray(np.array(drawn.image, np.uint8))
    return image, max(0, round(drawn.depth))


def load(paths: tuple[str, ...], drops: Drops) -> tuple[tuple[str, str], ...]:
    """Reads (name, formula) from lists: one a line, or JSONL `{"text": ...}`; dollars are taken off.

    Raises:
      ValueError: if there is no formula.
    """
    found: list[tuple[str, str]] = []
    for path in corpus.input_files(paths, SUFFIXES):
        for name, text, _ in corpus.read_texts(path, drops):
            lines = [text] if path.suffix == ".jsonl" else text.splitlines()
            for line in filter(None, map(str.strip, lines)):
                bare = _DOLLARS.match(line)
                found.append((name, bare[2] if bare else line))
    if not found:
        raise ValueError(f"input {list(paths)}: no formula in it; {drops.summary()}")
    return tuple(found)


class FormulaTask:
    """Draws formulas from the grammar, or from a list. See `sampling.Task`."""

    kind = "formulas"

    def __init__(
        self,
        cfg: FormulaConfig,
        given: tuple[tuple[str, str], ...] = (),
        prepared: dict[str, dict[str, Any]] | None = None,
    ):
        self._cfg, self._given, self._prepared = cfg, given, prepared or {}

    def settings(self) -> dict[str, Any]:
        """See `sampling.Task`."""
        text = json.dumps([formula for _, formula in self._given])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16] if self._given else "grammar"
        return {**dataclasses.asdict(self._cfg), "text": digest}

    def licences(self) -> dict[str, str]:
        """See `sampling.Task`."""
        return LICENCES

    def prepared(self) -> dict[str, dict[str, Any]]:
        """See `sampling.Task`."""
        return self._prepared

    def sample(self, rng: np.random.Generator, index: int) -> Sample | Drop:
        """See `sampling.Task`."""
        drop = Drop("no formula could be drawn", f"sample {index}")
        for _ in range(_ATTEMPTS if self._given else 1):
            if self._given:
                name, formula = self._given[rng.integers(len(self._given))]
            else:
                name, formula = "grammar", formula_grammar.formula(rng, self._cfg.max_depth)
            try:
                return self._draw(rng, formula)
            except FormulaError as error:
                drop = Drop("mathtext cannot draw it", f"{name}: {formula[:80]}: {error}"[:200])
        return drop

    def _draw(self, rng: np.random.Generator, formula: str) -> Sample:
        cfg = self._cfg
        font_set = FONT_SETS[rng.integers(len(FONT_SETS))]
        size = round(math.exp(rng.uniform(*np.log(cfg.sizes))))
        margin = int(rng.integers(4, 5 + size))
        while True:
            mask, _ = draw(formula, size, font_set)
            if mask.width + 2 * margin <= 0.95 * cfg.max_side or size <= cfg.sizes[0]:
                break
            size = max(cfg.sizes[0], int(size * 0.8))
        look = looks.sample(rng, cfg.noise, text_px=size)
        page = looks.colourise(ImageOps.expand(mask, margin, 0), look)
        page = looks.finish(page, look)
        image, suffix = encode(page, look.jpeg_quality)
        return Sample(
            image=image,
            suffix=suffix,
            width=page.width,
            height=page.height,
            prompt=ask(rng, corpus.instructions("formulas", "zh" if rng.random() < 0.2 else "en")),
            answer=formula,
            meta={"fonts": [f"mathtext {font_set}"], "size_px": size, **look.meta()},
        )
