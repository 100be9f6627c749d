"""TrueType faces and cached digit masks for the rendered pages.

The DejaVu faces are installed together with Matplotlib (free licence, `LICENSE_DEJAVU` beside
them), so a page can be drawn on any machine without copying a font file into this repository.
"""

import functools
import pathlib

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

FACES = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
)
DIGITS = "0123456789"

# Size in points at which a face's proportions are measured: big enough that rounding to whole
# pixels changes them by less than 1 %.
_MEASURED_AT = 200


def font_path(face: str) -> pathlib.Path:
    """Returns the path of a face's TrueType file.

    Raises:
      FileNotFoundError: if the installed Matplotlib has no such face.
    """
    path = pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{face}.ttf"
    if not path.is_file():
        raise FileNotFoundError(f"face {face!r}: no font file {path}")
    return path


@functools.lru_cache(maxsize=512)
def _font(face: str, half_points: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(
        str(font_path(face)), half_points / 2, layout_engine=ImageFont.Layout.BASIC
    )


@functools.cache
def _proportions(face: str) -> tuple[float, float]:
    """Height of the tallest digit over the size, and the widest digit over the tallest."""
    font = _font(face, 2 * _MEASURED_AT)
    boxes = [font.getbbox(digit) for digit in DIGITS]
    height = max(bottom - top for _, top, _, bottom in boxes)
    width = max(right - left for left, _, right, _ in boxes)
    return height / _MEASURED_AT, width / height


def digit_aspect(face: str) -> float:
    """Returns the widest digit's ink width over the tallest digit's ink height."""
    return _proportions(face)[1]


@functools.lru_cache(maxsize=20_000)
def _mask(face: str, half_points: int, digit: str) -> np.ndarray:
    font = _font(face, half_points)
    _, _, right, bottom = font.getbbox(digit)
    canvas = Image.new("L", (int(right) + 4, int(bottom) + 4))
    ImageDraw.Draw(canvas).text((2, 0), digit, fill=255, font=font)
    mask = np.asarray(canvas.crop(canvas.getbbox())).astype(np.float32) / 255.0
    mask.flags.writeable = False  # the cache hands the same array to every page
    return mask


def digit_mask(face: str, height: float, digit: str) -> np.ndarray:
    """Returns a digit's ink coverage, cropped to its ink.

    Args:
      face: one of `FACES`.
      height: wanted height of the digit's ink in pixels; the size is rounded to half a point,
        and hinting and anti-aliasing may add or take a pixel.
      digit: one character of `DIGITS`.

    Returns:
      float32 [height, width] in 0..1; read-only, shared between calls.

    Raises:
      ValueError: if `digit` is not one decimal digit or `height` is not positive.
    """
    if digit not in DIGITS or len(digit) != 1:
        raise ValueError(f"digit {digit!r}: expected one of {DIGITS!r}")
    if height <= 0:
        raise ValueError(f"digit height {height}: must be positive")
    half_points = max(2, round(2 * height / _proportions(face)[0]))
    return _mask(face, half_points, digit)
