"""Compiled kernels of `resample`; importing this imports Numba and compiles nothing yet.

A blend of whole rows is the only arithmetic, so that the inner loops run along contiguous memory and
compile to SIMD. The vertical pass blends rows of the image as they lie. The horizontal pass first
transposes a block of `_BLOCK` rows, which makes its columns contiguous, and blends those.

Arrays are uint8 and two-dimensional, a row being `width * channels` bytes. Weights come in groups of
four a output row, fixed point of `BITS` fractional bits, short rows being filled with zeros.
"""

import typing

import numba
import numpy as np

BITS = 22  # 32 less 8 for the pixel and 2 for the overshoot of the filter
_HALF = 1 << (BITS - 1)
_BLOCK = 32


def _jit(function):
    """Compiles on the first call; kept on disk unless no folder for that can be written."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # Numba's way to say so: a read-only installation without a home
        return numba.njit(nogil=True)(function)


@_jit
@typing.no_type_check
def _blend(rows, start, weights, total, out):
    """Sum of weights[k] * rows[start + k] -> out, rounded and clipped; total is int32 scratch."""
    last = len(rows) - 1  # a row past the end has weight zero: any row serves
    groups = len(weights) // 4
    for group in range(groups):
        k = 4 * group
        w0, w1, w2, w3 = weights[k], weights[k + 1], weights[k + 2], weights[k + 3]
        r0, r1 = rows[min(start + k, last)], rows[min(start + k + 1, last)]
        r2, r3 = rows[min(start + k + 2, last)], rows[min(start + k + 3, last)]
        # Narrowing each sum to int32 lets it be computed in 32-bit lanes.
        if groups == 1:
            for j in range(len(out)):
                sum_ = np.int32(_HALF + w0 * r0[j] + w1 * r1[j] + w2 * r2[j] + w3 * r3[j])
                out[j] = min(max(sum_ >> BITS, 0), 255)
        elif group == 0:
            for j in range(len(out)):
                total[j] = np.int32(_HALF + w0 * r0[j] + w1 * r1[j] + w2 * r2[j] + w3 * r3[j])
        elif group < groups - 1:
            for j in range(len(out)):
                total[j] = np.int32(total[j] + w0 * r0[j] + w1 * r1[j] + w2 * r2[j] + w3 * r3[j])
        else:
            for j in range(len(out)):
                sum_ = np.int32(total[j] + w0 * r0[j] + w1 * r1[j] + w2 * r2[j] + w3 * r3[j])
                out[j] = min(max(sum_ >> BITS, 0), 255)


@_jit
@typing.no_type_check
def resize_rows(rows, starts, weights, out):
    """Vertical pass: rows [N, C] -> out [M, C] with starts [M] and weights [M, 4 n] int32."""
    total = np.empty(out.shape[1], np.int32)
    for y in range(len(out)):
        _blend(rows, starts[y], weights[y], total, out[y])


@_jit
@typing.no_type_check
def _transpose(rows, columns):
    """rows [N, C] -> columns[:, :N]."""
    for x in range(rows.shape[1]):
        column = columns[x]
        if len(rows) == _BLOCK:  # a constant count, which is unrolled: three times as fast
            for y in range(_BLOCK):
                column[y] = rows[y, x]
        else:
            for y in range(len(rows)):
                column[y] = rows[y, x]


@_jit
@typing.no_type_check
def _transpose_back(columns, rows):
    """columns[:, :N] -> rows [N, C]."""
    for x in range(rows.shape[1]):
        column = columns[x]
        if len(rows) == _BLOCK:
            for y in range(_BLOCK):
                rows[y, x] = column[y]
        else:
            for y in range(len(rows)):
                rows[y, x] = column[y]


@_jit
@typing.no_type_check
def resize_columns(rows, starts, weights, out, channels):
    """Horizontal pass: rows [N, W * channels] -> out [N, M * channels], starts [M]."""
    # A row of the transposed block holds a channel of a pixel of _BLOCK image rows.
    block = np.zeros((rows.shape[1], _BLOCK), np.uint8)
    resized = np.empty((out.shape[1], _BLOCK), np.uint8)
    pixels = block.reshape(-1, channels * _BLOCK)
    resized_pixels = resized.reshape(-1, channels * _BLOCK)
    total = np.empty(channels * _BLOCK, np.int32)
    for top in range(0, len(rows), _BLOCK):
        _transpose(rows[top : top + _BLOCK], block)
        for x in range(len(starts)):
            _blend(pixels, starts[x], weights[x], total, resized_pixels[x])
        _transpose_back(resized, out[top : top + _BLOCK])
