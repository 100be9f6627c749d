"""Bilinear resizing of a token map as a gather: which four tokens blend, and how much of each."""

from __future__ import annotations

import numpy as np


def resize_map(tile_map: np.ndarray, rows: int, cols: int) -> tuple[np.ndarray, np.ndarray]:
    """Corners int32 and weights float32, [rows, cols, 4] each, that resize a map bilinearly.

    Half-pixel centres, edges repeated, no smoothing when shrinking: what the original gets from
    its framework's bilinear interpolation.
    """
    y0, y1, y_weight = _interpolate(tile_map.shape[0], rows)
    x0, x1, x_weight = _interpolate(tile_map.shape[1], cols)
    corners = [tile_map[np.ix_(y, x)] for y in (y0, y1) for x in (x0, x1)]
    weights = [np.outer(y, x) for y in (1 - y_weight, y_weight) for x in (1 - x_weight, x_weight)]
    return np.stack(corners, axis=-1), np.stack(weights, axis=-1).astype(np.float32)


def _interpolate(old: int, new: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lower and upper neighbour of each of `new` positions among `old`, and the upper's weight."""
    position = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0)
    lower = position.astype(np.int32)
    return lower, np.minimum(lower + 1, old - 1), position - lower
