"""Frequencies of rotary position embeddings; NumPy alone, so that the exported runner has them."""

from __future__ import annotations

import numpy as np


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """float32 theta^(-2i/H) [H / 2], with the roundings of the PyTorch code that trains checkpoints.

    Those are of the exponent, of the power and of its inverse. XLA's float32 power rounds otherwise,
    which is a phase of up to 7e-4 at position 12,287; hence NumPy, on the host.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    power = (np.float64(theta) ** exponent.astype(np.float64)).astype(np.float32)
    return np.float32(1.0) / power
