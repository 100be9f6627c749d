"""Image files -> upright RGB images, or one typed error; never a crash, never unbounded memory.

What each kind of file becomes (docs/tiling.md repeats it as a table):

* EXIF (or XMP) orientation is applied, so width and height are those a viewer shows.
* Alpha in any form (RGBA, LA, PA, a transparent palette entry or colour) is composited on
  `ImageLimits.background`.
* 1, L, P, CMYK, YCCK and others are converted as Pillow does, without colour management.
* 16-bit samples keep their high byte, grey (I;16, I) and colour alike. Floats are clipped to
  0..255 and rounded, or first multiplied by 255 if none exceeds 1; NaN is 0.
* Animations (GIF, WebP, APNG, MPO) give their first frame; ICC profiles are ignored.
* The content decides the format, not the file's name.

Sizes are checked before any pixel is decoded, so memory is bounded by the limits, not by a header.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from PIL import Image

from bluelm_jax.data.image_bytes import ImageBytes, ImageFile
from bluelm_jax.data.pixel_modes import to_rgb

BadImageKind = Literal[
    "missing", "not_a_file", "symlink_loop", "empty", "not_an_image", "damaged", "truncated",
    "too_large", "too_small", "too_thin", "bad_name", "absolute_path", "outside_root",
]  # fmt: skip

# Raster formats only: Pillow's EPS reader, for one, starts an interpreter on the file.
FORMATS = ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "PPM", "AVIF", "JPEG2000")

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageLimits:
    """What is accepted, and the colour behind transparency.

    Attributes:
      max_megapixels: width * height / 1e6; decoding takes about four bytes a pixel. Pillow's own
        `Image.MAX_IMAGE_PIXELS` holds beside it.
      min_side: pixels of the shorter side.
      max_aspect_ratio: longer side / shorter side.
      background: RGB under transparent pixels.
    """

    max_megapixels: float = 64.0
    min_side: int = 2
    max_aspect_ratio: float = 200.0
    background: tuple[int, int, int] = (255, 255, 255)

    def __post_init__(self):
        object.__setattr__(self, "background", tuple(self.background))
        for field, least in (("max_megapixels", 0), ("min_side", 1), ("max_aspect_ratio", 1)):
            value = getattr(self, field)
            if not value >= least:
                raise ValueError(f"ImageLimits.{field} = {value!r}: must be >= {least}")
        if len(self.background) != 3 or not all(0 <= c <= 255 for c in self.background):
            raise ValueError(
                f"ImageLimits.background = {self.background!r}: must be three values in 0..255"
            )


class ImageError(ValueError):
    """An image file that cannot be used.

    Attributes:
      path: the file, as given; of bytes the file's name, since callers name the record.
      kind: a short name of the cause, for counting.
      reason: the cause in words.
      size: (width, height) in pixels that the file declares, None where it declares none.
    """

    def __init__(
        self, path: str, kind: BadImageKind, reason: str, size: tuple[int, int] | None = None
    ):
        super().__init__(path, kind, reason, size)  # all four, so that workers can pickle it
        self.path, self.kind, self.reason, self.size = path, kind, reason, size

    def __str__(self) -> str:
        size = "" if self.size is None else f" ({self.size[0]}x{self.size[1]})"
        return f"{self.path}: {self.reason}{size}"


DEFAULT_LIMITS = ImageLimits()


def file_name(file: ImageFile) -> str:
    """Path of a file, or the name of bytes without the record that holds them."""
    return file.name if isinstance(file, ImageBytes) else os.fspath(file)


def read_image(file: ImageFile, limits: ImageLimits = DEFAULT_LIMITS) -> Image.Image:
    """Reads an image file.

    Args:
      file: its path, or its bytes.
      limits: what is accepted.

    Returns:
      The whole image, upright, mode RGB.

    Raises:
      ImageError: the file is missing, empty, not an image, damaged or outside `limits`.
    """
    path = file_name(file)
    with open_header(file) as image:
        orientation = exif_orientation(image)
        check_limits(path, upright_size(image, orientation), limits)
        size = image.size
        try:
            image.load()
            rgb = to_rgb(image, limits.background)
            turn = _TURNS.get(orientation)
            return rgb if turn is None else rgb.transpose(turn)
        except Exception as error:  # decoders raise nearly everything on hostile data
            kind = "truncated" if "truncated" in str(error) else "damaged"
            raise ImageError(path, kind, f"truncated or damaged: {error}", size) from error


def read_size(file: ImageFile, limits: ImageLimits | None = None) -> tuple[int, int]:
    """Reads (width, height) of an image file, upright, from its header; decodes no pixel.

    Args:
      file: its path, or its bytes.
      limits: checked if given.

    Raises:
      ImageError: the file is missing, empty, not an image, or outside `limits`. Damage after the
        header goes unseen.
    """
    path = file_name(file)
    with open_header(file) as image:
        size = upright_size(image, exif_orientation(image))
        if limits is not None:
            check_limits(path, size, limits)
        return size


@contextmanager
def open_header(source: ImageFile) -> Iterator[Image.Image]:
    """The file as a Pillow image whose header is parsed and whose pixels are not; or ImageError."""
    path = file_name(source)
    with _opened(source, path) as file, _parse_header(path, file) as image:
        yield image


def _opened(source: ImageFile, path: str) -> io.BufferedReader | io.BytesIO:
    """A file that is regular and not empty, or bytes that are not."""
    if isinstance(source, ImageBytes):
        if not source.data:
            raise ImageError(path, "empty", "empty file")
        return io.BytesIO(source.data)
    try:
        # Opening a pipe or device could block for ever, so look before.
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            what = "a folder" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise ImageError(path, "not_a_file", what)
        if status.st_size == 0:
            raise ImageError(path, "empty", "empty file")
        return open(path, "rb")
    except (OSError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        looped = isinstance(error, OSError) and error.errno == errno.ELOOP
        kind = "symlink_loop" if looped else "missing"
        cause = getattr(error, "strerror", None) or error  # `error` repeats the path.
        raise ImageError(path, kind, f"cannot be opened: {cause}") from error


def _parse_header(path: str, file: io.BufferedReader | io.BytesIO) -> Image.Image:
    try:
        return Image.open(file, formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(path, "too_large", str(error), _declared_size(file)) from error
    except Image.UnidentifiedImageError as error:
        raise ImageError(path, "not_an_image", "not an image in a known format") from error
    except Exception as error:  # plugins raise nearly everything on hostile headers
        raise ImageError(path, "damaged", f"damaged header: {error}") from error


def _declared_size(file: io.BufferedReader | io.BytesIO) -> tuple[int, int] | None:
    """The size in the header of a file that Pillow refused to open as too large."""
    file.seek(0)
    prefix = file.read(16)
    for name in FORMATS:
        factory, accept = Image.OPEN.get(name, (None, None))
        if factory is None or (accept and accept(prefix) is not True):
            continue
        file.seek(0)
        try:
            return factory(file, "").size
        except Exception:
            continue
    return None


def exif_orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8 from what stands before the pixels; damaged EXIF counts as none."""
    if image.format == "TIFF":
        return 1  # Pillow turns TIFF files itself
    try:
        # Not image.getexif(): for a PNG that decodes every pixel in search of a later chunk.
        orientation = Image.Image.getexif(image).get(_ORIENTATION, 1)
    except Exception:
        return 1
    return orientation if orientation in _TURNS else 1


def upright_size(image: Image.Image, orientation: int) -> tuple[int, int]:
    """(width, height) as a viewer shows the image."""
    width, height = image.size
    return (height, width) if orientation >= 5 else (width, height)


def check_limits(path: str, size: tuple[int, int], limits: ImageLimits) -> None:
    """Raises ImageError where an upright size is outside `limits`."""
    width, height = size
    megapixels, side = width * height / 1e6, min(size)
    if megapixels > limits.max_megapixels:
        reason = f"{megapixels:.1f} megapixels, above max_megapixels = {limits.max_megapixels:g}"
        raise ImageError(path, "too_large", reason, size)
    if side < limits.min_side:
        reason = f"shorter side {side}, below min_side = {limits.min_side}"
        raise ImageError(path, "too_small", reason, size)
    if max(size) > limits.max_aspect_ratio * side:
        reason = f"side ratio {max(size) / side:.0f}, above max_aspect_ratio = "
        raise ImageError(path, "too_thin", f"{reason}{limits.max_aspect_ratio:g}", size)


def keep_freed_pixels(megabytes: int = 128) -> None:
    """Lets Pillow reuse the memory of freed images in this process, up to `megabytes`.

    By default it returns each image's memory to the system, and the page faults of getting it back
    take up to half of a large JPEG's decoding time. Meant for worker processes that do nothing but
    read images; 0 restores the default. Has no effect on pixels.

    Raises:
      ValueError: `megabytes` is negative.
    """
    if megabytes < 0:
        raise ValueError(f"megabytes = {megabytes}: must be >= 0")
    Image.core.set_blocks_max(megabytes * 2**20 // Image.core.get_block_size())


@functools.lru_cache(maxsize=64)
def _real_root(root: str) -> str:
    return os.path.realpath(root)


def resolve_path(root: str | os.PathLike[str], name: str) -> str:
    """The file that `name` of a dataset means, which must lie under `root`, links followed.

    Raises:
      ImageError: `name` is empty, absolute or leads out of `root`; kind 'bad_name',
        'absolute_path' or 'outside_root'.
    """
    root = _real_root(os.fspath(root))
    if not isinstance(name, str) or not name or "\0" in name:
        raise ImageError(repr(name), "bad_name", "not a file name")
    if os.path.isabs(name):
        raise ImageError(name, "absolute_path", f"absolute path; must be relative to {root}")
    try:
        path = os.path.realpath(os.path.join(root, name))
    except UnicodeError as error:  # Half of a surrogate pair; shown as an escape.
        raise ImageError(
            ascii(name), "bad_name", "not a file name: half a surrogate pair"
        ) from error
    if os.path.commonpath((root, path)) != root:
        raise ImageError(name, "outside_root", f"leads to {path}, outside of {root}")
    return path
