"""Styled text on lines: faces by style, words and formulas measured, broken and drawn."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageChops

from bluelm_jax.data.rendering import font_index, formulas, line_breaking, scripts, text_block
from bluelm_jax.data.rendering.markdown_tree import Run


@dataclasses.dataclass(frozen=True)
class Styled:
    """A face, and what is done to it where the family has no bold or no italic."""

    face: font_index.Face
    embolden: bool = False
    slant: bool = False


@dataclasses.dataclass(frozen=True)
class Piece:
    """Something that stands on a line: ink about an origin on the baseline.

    Attributes:
      ink: coverage, mode L.
      left: from the origin to the ink's left edge.
      top: from the baseline to the ink's top edge.
      advance: from the origin to the next one's.
      run: its style.
      way: `ltr` or `rtl`.
    """

    ink: Image.Image
    left: int
    top: int
    advance: float
    run: Run
    way: str


@dataclasses.dataclass(frozen=True)
class TextLine:
    """Pieces of one line with their x, left to right."""

    pieces: tuple[tuple[float, Piece], ...]
    width: float
    ascent: int
    descent: int


class Faces:
    """A family for text and a face for code, chosen to cover a document.

    `math_set` is the mathtext font set of its formulas.
    """

    def __init__(
        self, members: Sequence[font_index.Face], mono: font_index.Face | None, math_set: str
    ):
        self._members, self._mono, self.math_set = members, mono, math_set
        self._used: set[str] = set()

    def style(self, run: Run) -> Styled:
        """The face of a run; slant and weight are imitated where the family lacks them."""
        if run.code and self._mono is not None:
            self._used.add(self._mono.name)
            return Styled(self._mono, run.bold, run.italic)
        ranked = min(
            self._members,
            key=lambda face: (
                (face.bold != run.bold) + (face.slanted != run.italic),
                _plainness(face),
                face.name,
            ),
        )
        self._used.add(ranked.name)
        return Styled(ranked, run.bold and not ranked.bold, run.italic and not ranked.slanted)

    def names(self) -> list[str]:
        """Names of the faces that were asked for."""
        return sorted(self._used)


def _plainness(face: font_index.Face) -> int:
    """Words of a style beyond bold and italic: `Condensed`, `Light`; fewer are plainer."""
    plain = {"bold", "italic", "oblique", "regular", "book", "roman", "medium"}
    return sum(word.lower() not in plain for word in face.style.split())


class Typesetter:
    """Sets runs with `faces` at a size in pixels."""

    def __init__(self, faces: Faces, size: int):
        self.faces, self.size = faces, size
        self._setters: dict[tuple[Styled, bool, int], text_block.Setter] = {}

    def scaled(self, factor: float) -> Typesetter:
        """The same faces at another size."""
        return Typesetter(self.faces, max(6, round(self.size * factor)))

    def _setter(self, styled: Styled, shaped: bool) -> text_block.Setter:
        key = styled, shaped, self.size
        if key not in self._setters:
            self._setters[key] = text_block.Setter(styled.face, self.size, shaped)
        return self._setters[key]

    def metrics(self) -> tuple[int, int]:
        """Ascent and descent of the plain face."""
        setter = self._setter(self.faces.style(Run("")), False)
        return setter.ascent, setter.descent

    def piece(self, text: str, run: Run, way: str = "ltr") -> Piece:
        """Draws a stretch of one style; spaces at its ends count for the advance alone."""
        if run.math:
            ink, below = formulas.draw(text, self.size, self.faces.math_set)
            return Piece(ink, 0, below - ink.height, ink.width + 0.0, run, "ltr")
        styled = self.faces.style(run)
        shaped = scripts.needs_shaping(text)
        setter = self._setter(styled, shaped)
        line = setter.line(text, way)
        advance = setter.advance(text, way)
        ink, left = line.ink, line.left
        if styled.embolden:
            ink = _embolden(ink)
            advance += 1
        if styled.slant:
            ink, shift = _slant(ink, line.top)
            left += shift
        return Piece(ink, left, line.top, advance, run, way)

    def lines(self, runs: Sequence[Run], width: float) -> list[TextLine]:
        """Breaks runs into lines of at most `width` pixels, as far as pieces allow."""
        way = scripts.direction("".join(run.text for run in runs if not run.math))
        space = self._setter(self.faces.style(Run("")), False).width(" ")
        done: list[TextLine] = []
        current: list[tuple[str, Run]] = []
        used = 0.0
        for text, run in _units(runs):
            wide = self._measure(text.rstrip(" "), run) + space * text.startswith(" ")
            if run.newline or (current and used + wide > width and _may_break(current, text, run)):
                done += [self._line(current, way)] if current else []
                current, used = [], 0.0
            if not run.newline and (current or text.strip(" ")):
                current.append((text if current or run.math else text.lstrip(" "), run))
                used += wide + space * text.endswith(" ")
        return [*done, self._line(current, way)] if current else done

    def _measure(self, text: str, run: Run) -> float:
        if run.math:
            return self.piece(text, run).advance
        return self._setter(self.faces.style(run), False).width(text.strip(" ")) if text else 0.0

    def _line(self, units: list[tuple[str, Run]], way: str) -> TextLine:
        """Joins units of one style and direction, draws them, and puts them in visual order."""
        joined: list[tuple[str, Run, str]] = []
        for text, run in units:
            mine = _way(text, way)
            if (
                joined
                and not run.math
                and joined[-1][1:] == (dataclasses.replace(run, text=""), mine)
            ):
                joined[-1] = joined[-1][0] + text, *joined[-1][1:]
            else:
                joined.append((text, run if run.math else dataclasses.replace(run, text=""), mine))
        text, run, mine = joined[-1]
        joined[-1] = text.rstrip(" "), run, mine
        if way == "rtl":  # a left-to-right stretch has the space that follows it on its left
            joined = [
                (" " + text.rstrip(" "), run, mine) if mine == "ltr" and text[-1:] == " " else part
                for part in joined
                for text, run, mine in [part]
            ]
        pieces = [self.piece(text, run, mine) for text, run, mine in joined if text]
        pieces = _visual_order(pieces, way)
        placed, x = [], 0.0
        for piece in pieces:
            placed.append((x, piece))
            x += piece.advance
        ascent, descent = self.metrics()
        return TextLine(
            tuple(placed),
            x,
            max([ascent, *(-piece.top for piece in pieces)]),
            max([descent, *(piece.top + piece.ink.height for piece in pieces)]),
        )


def _units(runs: Sequence[Run]) -> list[tuple[str, Run]]:
    """Breakable units with the space that follows; a formula and a line break are one each.

    The space between two styles starts the second's first unit if it is written there.
    """
    found: list[tuple[str, Run]] = []
    for run in runs:
        if run.math or run.newline:
            found.append((run.text, run))
            continue
        parts = line_breaking.pieces(run.text)
        if run.text.startswith(" ") and found:
            if parts:  # a space of its own style, not of the code or formula before it
                parts[0] = " " + parts[0]
            else:
                found[-1] = _with_space(found[-1])
        found += [(part, run) for part in parts]
        if run.text.endswith(" ") and parts:
            found[-1] = _with_space(found[-1])
    return found


def _with_space(unit: tuple[str, Run]) -> tuple[str, Run]:
    text, run = unit
    return unit if run.newline or run.math or text.endswith(" ") else (text + " ", run)


def _may_break(current: list[tuple[str, Run]], text: str, run: Run) -> bool:
    """Whether a line may end before a unit: after a space, or where characters allow it."""
    before, last = current[-1]
    if before.endswith(" ") or text.startswith(" ") or run is last:
        return True
    if run.math or last.math or not text:
        return False
    return line_breaking.break_allowed(before[-1], text[0])


def _way(text: str, base: str) -> str:
    """A unit's own direction; digits and punctuation follow the paragraph's."""
    strong = any(char.isalpha() for char in text)
    return scripts.direction(text) if strong else base


def _visual_order(pieces: list[Piece], way: str) -> list[Piece]:
    """Right to left, with left-to-right stretches kept in their own order (UAX 9, rule L2)."""
    if way == "ltr":
        return pieces
    ordered: list[Piece] = []
    group: list[Piece] = []
    for piece in reversed(pieces):
        if piece.way == "ltr":
            group.insert(0, piece)
            continue
        ordered += group
        group = []
        ordered.append(piece)
    return ordered + group


def _embolden(ink: Image.Image) -> Image.Image:
    """Ink doubled one pixel to the right."""
    wide = Image.new("L", (ink.width + 1, ink.height))
    wide.paste(ink, (0, 0))
    shifted = Image.new("L", wide.size)
    shifted.paste(ink, (1, 0))
    return ImageChops.lighter(wide, shifted)


def _slant(ink: Image.Image, top: int) -> tuple[Image.Image, int]:
    """Ink sheared by a fifth about the baseline, and how far its left edge moved."""
    slope = 0.2
    right, left = slope * max(0, -top), slope * max(0, top + ink.height)
    size = ink.width + math.ceil(right) + math.ceil(left) + 1, ink.height
    shift = -math.ceil(left)
    # Output (x, y) shows input x + shift - slope * (height above the baseline).
    affine = (1.0, slope, shift + slope * top, 0.0, 1.0, 0.0)
    slanted = ink.transform(size, Image.Transform.AFFINE, affine, Image.Resampling.BILINEAR)
    return slanted, shift


def paste(page: Image.Image, line: TextLine, x: float, baseline: float, ink: tuple) -> None:
    """Draws a line on an RGB page in a colour."""
    for offset, piece in line.pieces:
        at = round(x + offset + piece.left), round(baseline + piece.top)
        page.paste(ink, (*at, at[0] + piece.ink.width, at[1] + piece.ink.height), piece.ink)


def mix(a: tuple, b: tuple, share: float) -> tuple[int, int, int]:
    """The colour `share` of the way from a to b."""
    return tuple(np.rint(np.add(a, np.subtract(b, a) * share)).astype(int).tolist())
