"""What is odd in an image file: from its header alone, or with its pixels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from PIL import Image

from bluelm_jax.data import images
from bluelm_jax.data.image_bytes import ImageFile, image_name
from bluelm_jax.data.images import ImageError, ImageLimits
from bluelm_jax.data.record_checks import Odd

_EXTENSIONS = {
    ".jpg": "JPEG", ".jpeg": "JPEG", ".jfif": "JPEG", ".png": "PNG", ".apng": "PNG", ".gif": "GIF",
    ".webp": "WEBP", ".bmp": "BMP", ".tif": "TIFF", ".tiff": "TIFF", ".ppm": "PPM", ".pgm": "PPM",
    ".pbm": "PPM", ".avif": "AVIF", ".jp2": "JPEG2000",
}  # fmt: skip
_SAME = {"MPO": "JPEG"}  # Formats that are another one with more behind it.
_END = {"JPEG": b"\xff\xd9", "PNG": b"IEND", "GIF": b"\x3b"}
_TAIL = 64  # Bytes in which the end marker is looked for; some writers append a few.


def check_image(
    source: ImageFile, limits: ImageLimits, *, min_side: int, decode: bool
) -> Iterator[Odd]:
    """What is odd about a file, its error first if it cannot be used.

    Args:
      source: the file's path, or its bytes.
      limits: bounds that make an image an error.
      min_side: a shorter side below it is worth a warning.
      decode: decode the pixels too.
    """
    found: list[Odd] = []
    path = image_name(source)
    try:
        with images.open_header(source) as image:
            found += _check_header(path, image, min_side)
            size = images.upright_size(image, images.exif_orientation(image))
            images.check_limits(path, size, limits)
        if decode:
            images.read_image(source, limits)
    except ImageError as error:
        yield of_error(error)
        if error.kind == "too_small":  # Says what 'image_tiny' would say.
            return
    yield from found


def of_error(error: ImageError) -> Odd:
    """The finding that an error of `images` stands for."""
    size = "" if error.size is None else f" ({error.size[0]}x{error.size[1]})"
    return Odd(f"image_{error.kind}", "", f"{error.reason}{size}")


def _check_header(path: str, image: Image.Image, min_side: int) -> Iterator[Odd]:
    yield from _check_file(path, image)
    orientation = images.exif_orientation(image)
    width, height = image.size
    if orientation != 1:
        shown = f"{height}x{width}" if orientation >= 5 else f"{width}x{height}"
        detail = f"orientation {orientation}: stored {width}x{height}, shown {shown}"
        yield Odd("image_exif_rotated", "", detail)
    if min(image.size) < min_side:
        yield Odd("image_tiny", "", f"{width}x{height}, min_side = {min_side}")
    if _frames(image) > 1:
        yield Odd("image_animated", "", image.format or "")
    yield from _check_mode(image)


def _check_file(path: str, image: Image.Image) -> Iterator[Odd]:
    """Name, length and end of the file."""
    kind = _SAME.get(image.format or "", image.format or "")
    extension = os.path.splitext(path)[1].lower()
    if _EXTENSIONS.get(extension, kind) != kind:
        yield Odd("image_wrong_extension", "", f"{extension}, content is {kind}")
    file: Any = getattr(image, "fp", None)
    if file is None:
        return
    at = file.tell()
    size = file.seek(0, os.SEEK_END)
    file.seek(-min(size, _TAIL), os.SEEK_END)
    tail = file.read()
    file.seek(at)
    if size < _TAIL:
        yield Odd("image_near_empty", "", f"{size} bytes")
    if kind in _END and _END[kind] not in tail:
        yield Odd("image_no_end_marker", "", kind)


def _frames(image: Image.Image) -> int:
    """2 for "several": counting them all would read the whole file."""
    try:
        return 2 if getattr(image, "is_animated", False) else 1
    except Exception:  # readers raise nearly everything where a later frame is damaged
        return 1


def _check_mode(image: Image.Image) -> Iterator[Odd]:
    mode = image.mode
    raw = " ".join(str(tile[3]) for tile in getattr(image, "tile", ()))
    if mode.startswith(("I", "F")) or ";16" in raw:
        yield Odd("image_16_bit", "", f"mode {mode}")
    elif mode == "P":
        yield Odd("image_palette", "", "")
    elif mode == "CMYK":
        yield Odd("image_cmyk", "", "")
    if image.has_transparency_data:
        yield Odd("image_transparent", "", f"mode {mode}")
