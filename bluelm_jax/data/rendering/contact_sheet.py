"""Many images on one, to look at."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Sequence

from PIL import Image


def sheet(
    images: Sequence[Image.Image], *, width: int = 1400, row: int = 150, gap: int = 6
) -> Image.Image:
    """Puts images in rows like the lines of a text, none enlarged.

    Args:
      images: at least one.
      width: of the sheet, pixels.
      row: images higher than this are shrunk to it.
      gap: pixels between.

    Raises:
      ValueError: without an image.
    """
    if not images:
        raise ValueError("a contact sheet needs at least one image")
    places: list[tuple[Image.Image, int, int]] = []
    x, y, deepest = gap, gap, 0
    for image in images:
        scale = min(1.0, row / image.height, (width - 2 * gap) / image.width)
        size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
        small = image.convert("RGB")
        small = small if size == image.size else small.resize(size, Image.Resampling.LANCZOS)
        if x > gap and x + small.width + gap > width:
            x, y, deepest = gap, y + deepest + gap, 0
        places.append((small, x, y))
        x, deepest = x + small.width + gap, max(deepest, small.height)
    page = Image.new("RGB", (width, y + deepest + gap), (128, 136, 148))
    for small, left, top in places:
        page.paste(small, (left, top))
    return page


def write(path: str | pathlib.Path, records: Sequence[pathlib.Path], count: int) -> None:
    """Writes a sheet of the first images that LLaVA files name, as PNG of 256 colours.

    Args:
      path: the sheet.
      records: LLaVA JSON files, their image paths relative to their folder.
      count: images on the sheet, shared evenly between the files.
    """
    images = []
    for file in records:
        named = json.loads(file.read_text(encoding="utf-8"))
        for record in named[: -(-count // len(records))]:
            with Image.open(file.parent / record["image"]) as image:
                images.append(image.convert("RGB"))
    page = sheet(images).quantize(256, dither=Image.Dither.NONE)
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    page.save(path, optimize=True)
