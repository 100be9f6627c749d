"""Bicubic and bilinear resizing of 8-bit images, byte for byte Pillow's: with Numba if it is installed.

Pillow resizes one axis after the other and rounds to uint8 in between. Up to release 12 the width
goes first; from 13 on the height does if it loses many more pixels (`_height_first`). An output
pixel is a weighted sum of the pixels within two (bilinear: one) of its own widths, or of an input
pixel's when enlarging. The weights are Keys' cubic with a = -0.5 or a triangle, normalised in
float64 and then rounded to 22 fractional bits, so the sums are integers, the same in whatever order
they are computed.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Literal

import numpy as np
import PIL
from PIL import Image

from bluelm_jax.schemes import Resample

_BITS = 22  # as in `resample_numba`, which is not to be imported before it is needed
_CUBIC_A = -0.5
_PILLOW = {"bicubic": Image.Resampling.BICUBIC, "bilinear": Image.Resampling.BILINEAR}


_DECIDING = threading.Lock()


def backend() -> Literal["numba", "pillow"]:
    """What resizes in this process; decided at the first call, which imports Numba if it is there."""
    with _DECIDING:  # Two threads that import what fails to import see each other's half of it.
        return _backend()


@functools.cache
def _backend() -> Literal["numba", "pillow"]:
    try:
        from bluelm_jax import resample_numba
    except ImportError as error:
        if error.name != "numba":  # such as a NumPy that this release of Numba turns down
            warnings.warn(f"Numba does not import, so Pillow resizes: {error}", stacklevel=3)
        return "pillow"
    del resample_numba
    if _order() is None:
        warnings.warn(
            f"Pillow {PIL.__version__} computes other pixels than Numba, so Pillow resizes",
            stacklevel=3,
        )
        return "pillow"
    return "numba"


def resizer(
    image: Image.Image, resample: Resample = "bicubic"
) -> Callable[[tuple[int, int]], np.ndarray]:
    """A function from (width, height) to the resized image, uint8 [height, width, 3].

    Its results may be read-only or share memory with the image. For several sizes of one image this
    is faster than `resize`.

    Args:
      image: mode RGB.
      resample: the filter.
    """
    if backend() == "pillow":
        return lambda size: np.asarray(image.resize(size, _PILLOW[resample]))
    return functools.partial(_resize_numba, np.asarray(image), resample=resample)


def resize(pixels: np.ndarray, size: tuple[int, int], resample: Resample = "bicubic") -> np.ndarray:
    """Resizes an image as Pillow's `Image.resize` does, byte for byte.

    Args:
      pixels: uint8 [H, W, 3], no side empty.
      size: (width, height) of the result, as Pillow has it.
      resample: the filter.

    Returns:
      uint8 [height, width, 3], a new array.

    Raises:
      ValueError: pixels are not uint8 [H, W, 3], or a side is less than 1.
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(f"pixels {pixels.dtype} {pixels.shape}: must be uint8 [H, W, 3]")
    if min(*pixels.shape, *size) < 1:
        raise ValueError(f"resizing {pixels.shape[:2]} to {size[::-1]} [H, W]: a side is below 1")
    if backend() == "pillow":
        return np.array(Image.fromarray(pixels).resize(size, _PILLOW[resample]))
    resized = _resize_numba(pixels, size, resample)
    return resized.copy() if np.may_share_memory(resized, pixels) else resized


def _resize_numba(pixels: np.ndarray, size: tuple[int, int], resample: Resample) -> np.ndarray:
    """As `resize`, but at the same size it returns the pixels given."""
    order = _order()
    assert order is not None, "backend() admits Numba with a known order only"
    height_first = order((pixels.shape[1], pixels.shape[0]), size)
    return _two_passes(pixels, size, height_first, resample)


def _two_passes(
    pixels: np.ndarray, size: tuple[int, int], height_first: bool, resample: Resample = "bicubic"
) -> np.ndarray:
    """Resizes height and width in the given order; an axis that keeps its length is left alone."""
    from bluelm_jax import resample_numba as kernels

    width, height = size
    pixels = np.ascontiguousarray(pixels)
    for axis in (0, 1) if height_first else (1, 0):
        rows = pixels.reshape(len(pixels), -1)
        rows.flags.writeable = False  # as Pillow's are: one type to compile for, not two
        if axis == 0 and height != len(pixels):
            pixels = np.empty((height, *pixels.shape[1:]), np.uint8)
            weights = _weights(len(rows), height, resample)
            kernels.resize_rows(rows, *weights, pixels.reshape(height, -1))
        elif axis == 1 and width != pixels.shape[1]:
            weights = _weights(pixels.shape[1], width, resample)
            pixels = np.empty((len(rows), width, pixels.shape[2]), np.uint8)
            out = pixels.reshape(len(rows), -1)
            kernels.resize_columns(rows, *weights, out, pixels.shape[2])
    return pixels


def _height_first(size: tuple[int, int], new_size: tuple[int, int]) -> bool:
    """Pillow 13's order: found by comparing its pixels with either order over thousands of sizes."""
    return size[1] - new_size[1] > 2 * max(size[0] - new_size[0], 0)


def _width_first(size: tuple[int, int], new_size: tuple[int, int]) -> bool:
    """Pillow's order before release 13."""
    del size, new_size
    return False


@functools.cache
def _order() -> Callable[[tuple[int, int], tuple[int, int]], bool] | None:
    """Whether the height goes first, by size, as the installed Pillow has it; None: neither fits."""
    probes = [((9, 40), (12, 7)), ((30, 60), (20, 41)), ((30, 60), (20, 40)), ((30, 60), (20, 39))]
    noise = np.random.default_rng(0).integers(0, 256, (60, 30, 3), dtype=np.uint8)
    images = [np.ascontiguousarray(noise[: size[1], : size[0]]) for size, _ in probes]
    for order in (_height_first, _width_first):
        if all(
            np.array_equal(
                _two_passes(pixels, new_size, order(size, new_size)),
                np.asarray(Image.fromarray(pixels).resize(new_size, Image.Resampling.BICUBIC)),
            )
            for pixels, (size, new_size) in zip(images, probes, strict=True)
        ):
            return order
    return None


@functools.lru_cache(maxsize=32)
def _weights(length: int, new_length: int, resample: Resample) -> tuple[np.ndarray, np.ndarray]:
    """Which pixels of an axis make up each new pixel, and how much of each.

    Returns:
      int64 [N] first pixel, and int32 [N, 4 n] weights of it and those after it, in units of 2^-22;
      zero where there are fewer.
    """
    scale = length / new_length
    stretch = max(scale, 1.0)  # a smaller image takes a wider filter, against aliasing
    centres = (np.arange(new_length) + 0.5) * scale
    reach = (2.0 if resample == "bicubic" else 1.0) * stretch
    starts = np.maximum((centres - reach + 0.5).astype(np.int64), 0)
    ends = np.minimum((centres + reach + 0.5).astype(np.int64), length)
    taps = int((ends - starts).max())
    inputs = starts[:, None] + np.arange(taps + -taps % 4)
    kernel = _cubic if resample == "bicubic" else _triangle
    weights = kernel((inputs - centres[:, None] + 0.5) * (1.0 / stretch))
    weights[inputs >= ends[:, None]] = 0.0
    # Added one by one from the left, as Pillow does: np.sum rounds differently.
    weights /= np.cumsum(weights, axis=1)[:, -1:]
    fixed = weights * (1 << _BITS)
    return starts, np.trunc(fixed + np.copysign(0.5, fixed)).astype(np.int32)


def _triangle(x: np.ndarray) -> np.ndarray:
    """Linear interpolation, 0 beyond 1."""
    return np.maximum(1.0 - np.abs(x), 0.0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' interpolation kernel (IEEE TASSP 29(6), 1981, eq. 15 with a = -0.5), 0 beyond 2."""
    x, a = np.abs(x), _CUBIC_A
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0
    far = (((x - 5.0) * x + 8.0) * x - 4.0) * a
    return np.where(x < 1.0, near, np.where(x < 2.0, far, 0.0))
