"""Lines of text set in one face: measured, broken, drawn, aligned."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

from PIL import Image, ImageDraw

from bluelm_jax.data.rendering import font_index, line_breaking, scripts

# Widths are measured once at this size and scaled: big enough that hinting does not matter.
_MEASURED_AT = 64


@functools.lru_cache(maxsize=200_000)
def advance(path: str, index: int, char: str) -> float:
    """Width of a character over the font size, without kerning and joining."""
    if scripts.is_wide(char):
        return 1.0
    if char in "\u200c\u200d":
        return 0.0
    return font_index.load(path, index, _MEASURED_AT, False).getlength(char) / _MEASURED_AT


@dataclasses.dataclass(frozen=True)
class Line:
    """A drawn line: its ink, and where that stands.

    Attributes:
      ink: coverage, mode L, cropped to the ink.
      left: from the line's origin to the ink's left edge, pixels.
      top: from the baseline to the ink's top edge, pixels, negative above it.
      way: `ltr` or `rtl`.
    """

    ink: Image.Image
    left: int
    top: int
    way: str

    @property
    def bottom(self) -> int:
        """From the baseline down to the ink's lower edge."""
        return self.top + self.ink.height


class Setter:
    """Sets text in one face at one size."""

    def __init__(self, face: font_index.Face, size: int, shaped: bool):
        self._face, self._size, self._shaped = face, size, shaped
        self.font = font_index.load(face.path, face.index, size, shaped)
        self.ascent, self.descent = self.font.getmetrics()

    def width(self, text: str) -> float:
        """Width in pixels, near enough to break lines by: a sum over the characters.

        Shaping every word takes longer than drawing the lines. A line that comes out wider than it
        was measured widens the block; nothing is cut.
        """
        return self._size * sum(advance(self._face.path, self._face.index, c) for c in text)

    def block_width(self, paragraphs: list[str], aspect: float) -> float:
        """Line width for a block of about `aspect`, at least that of the widest piece."""
        total = sum(self.width(paragraph) for paragraph in paragraphs)
        widest = max(line_breaking.widest_piece(text, self.width) for text in paragraphs)
        return max(math.sqrt(total * (self.ascent + self.descent) * aspect), widest + 1)

    def line(self, text: str, way: str = "ltr") -> Line:
        """Draws one line; text without ink gives one empty pixel."""
        room = max(8, self._size // 2)
        width = math.ceil(self.width(text))
        while True:
            size = width + 2 * room, self.ascent + self.descent + 2 * room
            scratch = Image.new("L", size)
            pen = ImageDraw.Draw(scratch)
            at = (room, room + self.ascent)
            if self._shaped:
                pen.text(at, text, 255, self.font, "ls", direction=way)
            else:
                pen.text(at, text, 255, self.font, "ls")
            box = scratch.getbbox() or (room, at[1] - 1, room + 1, at[1])
            if box[0] > 0 and box[1] > 0 and box[2] < size[0] and box[3] < size[1]:
                return Line(scratch.crop(box), box[0] - at[0], box[1] - at[1], way)
            room *= 3  # ink at an edge: some of it may lie beyond

    def advance(self, text: str, way: str = "ltr") -> float:
        """Exact width in pixels, spaces at the ends included."""
        if self._shaped:
            return self.font.getlength(text, direction=way)
        return self.font.getlength(text)

    def lines(self, paragraphs: list[str], width: float) -> list[Line]:
        """Breaks paragraphs and draws their lines."""
        return [
            self.line(text, scripts.direction(paragraph))
            for paragraph in paragraphs
            for text in line_breaking.wrap(paragraph, width, self.width)
        ]

    def draw(
        self, paragraphs: list[str], width: float, *, spacing: float, margin: int, align: str
    ) -> Image.Image:
        """Coverage of the whole block, mode L, sized to its ink.

        Args:
          paragraphs: each starts a line.
          width: widest line, as far as pieces allow.
          spacing: baseline distance over the face's own height; lines that would touch get more.
          margin: pixels on each side.
          align: `start` (right for right-to-left lines), `centre` or `end`.
        """
        lines = self.lines(paragraphs, width)
        step = max(
            round((self.ascent + self.descent) * spacing),
            max((a.bottom - b.top + 1 for a, b in itertools.pairwise(lines)), default=0),
        )
        widest = max(line.ink.width for line in lines)
        top = min(-self.ascent, lines[0].top)
        bottom = (len(lines) - 1) * step + max(self.descent, lines[-1].bottom)
        mask = Image.new("L", (widest + 2 * margin, bottom - top + 2 * margin))
        for number, line in enumerate(lines):
            far = {"start": line.way == "rtl", "end": line.way == "ltr"}.get(align, 0.5)
            x = margin + round((widest - line.ink.width) * float(far))
            y = margin - top + number * step + line.top
            mask.paste(line.ink, (x, y))
        return mask
