"""A page under construction: text and boxes, collected before its size is known."""

from __future__ import annotations

import dataclasses

from PIL import Image, ImageDraw

from bluelm_jax.data.rendering import looks
from bluelm_jax.data.rendering.markdown_inline import TextLine, mix, paste


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageStyle:
    """How blocks look.

    Attributes:
      width: text width in pixels; a table or a long word may need more.
      spacing: line distance over the face's height.
      bullet: the mark of unordered lists.
      table: see `markdown_tables.STYLES`.
    """

    width: int
    spacing: float = 1.25
    bullet: str = "•"
    table: str = "grid"


class Page:
    """Collects what is to be drawn; the page's size is known when all of it is."""

    def __init__(self, style: PageStyle):
        self.style = style
        self.right = self.bottom = 0.0
        # Where lines end; less within right-to-left lists, whose marks stand on the right.
        self.limit = float(style.width)
        self.texts: list[tuple[TextLine, float, float]] = []
        self.boxes: list[tuple[tuple[float, float, float, float], float]] = []

    def text(self, line: TextLine, x: float, baseline: float) -> None:
        """Puts a line with its origin at (x, baseline)."""
        self.texts.append((line, x, baseline))
        inks = (x + at + piece.left + piece.ink.width for at, piece in line.pieces)
        self.right = max(self.right, x + line.width, *inks)

    def box(self, box: tuple[float, float, float, float], shade: float) -> None:
        """Fills a box (left, top, right, bottom) with paper mixed with ink by `shade`."""
        self.boxes.append((box, shade))
        self.right = max(self.right, box[2])

    def draw(self, look: looks.Look, margin: int) -> Image.Image:
        """The page as an RGB image, boxes below text."""
        size = round(self.right) + 2 * margin + 1, round(self.bottom) + 2 * margin + 1
        image = Image.new("RGB", size, look.paper)
        pen = ImageDraw.Draw(image)
        for (left, top, right, bottom), shade in self.boxes:
            corners = [round(v + margin) for v in (left, top, right, bottom)]
            corners[2], corners[3] = (
                max(corners[2] - 1, corners[0]),
                max(corners[3] - 1, corners[1]),
            )
            pen.rectangle(corners, mix(look.paper, look.ink, shade))
        for line, x, baseline in self.texts:
            paste(image, line, x + margin, baseline + margin, look.ink)
            _strike(pen, line, x + margin, baseline + margin, look.ink)
        return image


def _strike(
    pen: ImageDraw.ImageDraw, line: TextLine, x: float, y: float, ink: looks.Colour
) -> None:
    for at, piece in line.pieces:
        if piece.run.strike:
            level = round(y - 0.28 * line.ascent)
            left = round(x + at + piece.left)
            pen.line((left, level, left + piece.ink.width, level), ink, 1)
