"""How a page was printed and photographed: colours, blur, rotation, paper, noise, JPEG."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
from PIL import Image, ImageChops, ImageFilter

Colour = tuple[int, int, int]
_FIELD = 1024
# The stored field's standard deviation in grey levels; a page scales it to its own.
_FIELD_SD = 24.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Look:
    """One page's look.

    Attributes:
      ink: text colour.
      paper: background colour.
      blur: standard deviation of the blur in pixels, 0 for none.
      rotation: degrees, counter-clockwise.
      texture: standard deviation of the paper's slow changes in grey levels.
      noise: standard deviation of the pixel noise in grey levels.
      field_at: corner (x, y) of the stored fields where this page's begin.
      jpeg_quality: 1..95, or None for PNG.
    """

    ink: Colour = (0, 0, 0)
    paper: Colour = (255, 255, 255)
    blur: float = 0.0
    rotation: float = 0.0
    texture: float = 0.0
    noise: float = 0.0
    field_at: tuple[int, int] = (0, 0)
    jpeg_quality: int | None = None

    def meta(self) -> dict[str, Any]:
        """What was done to the page, without what was not."""
        values = {
            "blur": round(self.blur, 2),
            "rotation": round(self.rotation, 2),
            "texture": round(self.texture, 1),
            "noise": round(self.noise, 1),
            "jpeg_quality": self.jpeg_quality,
        }
        return {name: value for name, value in values.items() if value}


def luminance(colour: Colour) -> float:
    """Brightness of an sRGB colour in 0..255, by the weights of ITU-R BT.601."""
    return 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2]


def sample(rng: np.random.Generator, noise: float, *, text_px: float = 16.0) -> Look:
    """Draws a look.

    Args:
      rng: random numbers.
      noise: how much is done to the page, 0..1: 0 is black to dark on white to light, sharp and
        straight, as PNG; at 1 two pages in three get some of blur, rotation, texture, noise, JPEG.
      text_px: height of the text; blur and rotation stay small enough for it to be read.
    """
    ink, paper = _colours(rng, contrast=170.0 - 80.0 * noise * rng.random())
    if rng.random() >= 0.67 * noise:
        return Look(ink=ink, paper=paper)
    does = rng.random(5) < (0.35, 0.35, 0.5, 0.5, 0.75)
    amount = rng.random(5)
    at = rng.integers(_FIELD, size=2)
    return Look(
        ink=ink,
        paper=paper,
        blur=float(does[0] * amount[0] * noise * min(1.2, text_px / 24.0)),
        rotation=float(does[1] * (2 * amount[1] - 1) * noise * 2.5),
        texture=float(does[2] * amount[2] * noise * 10.0),
        noise=float(does[3] * amount[3] * noise * 14.0),
        field_at=(int(at[0]), int(at[1])),
        jpeg_quality=int(95 - amount[4] * noise * 60) if does[4] else None,
    )


def _colours(rng: np.random.Generator, contrast: float) -> tuple[Colour, Colour]:
    """Ink and paper at least `contrast` grey levels apart; one page in eight is light on dark."""
    tinted, pastel = rng.random() < 0.45, rng.random() < 0.6
    draw = rng.integers(0, 256, (8, 2, 3))
    light_on_dark = rng.random() < 0.125
    pair = (0, 0, 0), (255, 255, 255)
    for ink, paper in draw.tolist():
        if not tinted:
            ink, paper = [ink[0] // 3] * 3, [255 - paper[0] // 5] * 3
        elif pastel:
            ink, paper = [level // 2 for level in ink], [255 - level // 5 for level in paper]
        drawn = _colour(ink), _colour(paper)
        dark, light = sorted(drawn, key=luminance)
        if luminance(light) - luminance(dark) >= contrast:
            pair = dark, light
            break
    return (pair[1], pair[0]) if light_on_dark else pair


def _colour(levels: list[int]) -> Colour:
    red, green, blue = levels
    return red, green, blue


def colourise(mask: Image.Image, look: Look) -> Image.Image:
    """Ink over paper by coverage; `mask` has mode L.

    The result has mode L where both colours are grey; else P, with the 256 mixtures as its palette,
    where nothing more will be done to it, which makes a third of the data to encode; else RGB.
    """
    if len(set(look.ink)) == len(set(look.paper)) == 1:
        return _blend(mask, "L", look.ink[0], look.paper[0])
    if look == Look(ink=look.ink, paper=look.paper):
        page = mask.copy()
        ink, paper = np.array(look.ink), np.array(look.paper)
        share = np.arange(256)[:, None] / 255.0
        page.putpalette(np.rint(paper + (ink - paper) * share).astype(np.uint8).tobytes())
        return page
    return _blend(mask, "RGB", look.ink, look.paper)


def _blend(mask: Image.Image, mode: str, ink: int | Colour, paper: int | Colour) -> Image.Image:
    page = Image.new(mode, mask.size, paper)
    page.paste(ink, (0, 0, *mask.size), mask)
    return page


def finish(page: Image.Image, look: Look) -> Image.Image:
    """Applies all but the colours to a page; rotation makes it larger. P is left as it is."""
    if look.rotation:
        fill = look.paper if page.mode == "RGB" else look.paper[0]
        page = page.rotate(look.rotation, Image.Resampling.BILINEAR, expand=True, fillcolor=fill)
    if look.blur > 0.2:
        page = page.filter(ImageFilter.GaussianBlur(look.blur))
    for field, amount in (("slow", look.texture), ("fast", look.noise)):
        if amount > 0.5:
            shifts = _window(field, page.size, look.field_at)
            scale = amount / _FIELD_SD
            shifts = shifts.point([round(128 + (level - 128) * scale) for level in range(256)])
            if page.mode == "RGB":
                shifts = Image.merge("RGB", (shifts,) * 3)
            page = ImageChops.add(page, shifts, 1, -128)
    return page


def _window(name: str, size: tuple[int, int], at: tuple[int, int]) -> Image.Image:
    """A part of a stored field, which repeats."""
    width, height = size
    field = _field(name)
    x, y = at
    if x + width <= _FIELD and y + height <= _FIELD:
        return field.crop((x, y, x + width, y + height))
    window = Image.new("L", size)
    for left in range(-x, width, _FIELD):
        for top in range(-y, height, _FIELD):
            window.paste(field, (left, top))
    return window


@functools.cache
def _field(name: str) -> Image.Image:
    """`fast`: independent pixels. `slow`: fibres and stains, smooth over 2 to 60 pixels."""
    rng = np.random.default_rng(0 if name == "fast" else 1)
    if name == "fast":
        field = rng.standard_normal((_FIELD, _FIELD), dtype=np.float32)
    else:
        field = sum(
            _smooth(rng, radius) * share for radius, share in ((2.0, 0.5), (12.0, 0.5), (60.0, 1.0))
        )
        field = field / np.std(field)
    return Image.fromarray(np.clip(128.5 + _FIELD_SD * field, 0, 255).astype(np.uint8))


def _smooth(rng: np.random.Generator, radius: float) -> np.ndarray:
    """Periodic noise of unit variance with a Gaussian spectrum: float [field, field]."""
    spectrum = np.fft.rfft2(rng.standard_normal((_FIELD, _FIELD)))
    rows, cols = np.fft.fftfreq(_FIELD)[:, None], np.fft.rfftfreq(_FIELD)[None, :]
    smooth = np.fft.irfft2(spectrum * np.exp(-2 * (np.pi * radius) ** 2 * (rows**2 + cols**2)))
    return smooth / np.std(smooth)
