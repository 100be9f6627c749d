"""What a decoder call needs besides embeddings: KV cache, mask and RoPE tables, in NumPy."""

from __future__ import annotations

import numpy as np

from bluelm_jax.rotary import rope_frequencies
from export.bundle import Shapes

# Score of a pair that must not attend, added before the softmax: e^-100 is nothing beside any real
# weight, and a small range keeps an INT16 scale of the scores useful.
MASKED = -100.0


class KVCache:
    """Keys [1, K, C, H] and values [1, K, H, C] of every block, and how many positions are in use.

    The graphs read it and return new slices; `append` puts those behind what is there.
    """

    def __init__(self, shapes: Shapes):
        k, c, h = shapes.num_kv_heads, shapes.cache_size, shapes.head_dim
        self.length = 0
        self._k = [np.zeros((1, k, c, h), np.float32) for _ in range(shapes.depth)]
        self._v = [np.zeros((1, k, h, c), np.float32) for _ in range(shapes.depth)]

    def clear(self) -> None:
        """Forgets everything. Old values stay where they are: masked, until overwritten."""
        self.length = 0

    def inputs(self) -> dict[str, np.ndarray]:
        """The arrays as graph inputs, not copied."""
        named = {f"kv_cache_k_{i}": k for i, k in enumerate(self._k)}
        return named | {f"kv_cache_v_{i}": v for i, v in enumerate(self._v)}

    def append(self, outputs: dict[str, np.ndarray], count: int) -> None:
        """Takes the first `count` positions of the new slices."""
        start, stop = self.length, self.length + count
        for i, (k, v) in enumerate(zip(self._k, self._v, strict=True)):
            k[:, :, start:stop] = outputs[f"kv_slice_k_{i}"][:, :, :count]
            v[..., start:stop] = outputs[f"kv_slice_v_{i}"][..., :count]
        self.length = stop


def rope_tables(
    start: int, count: int, head_dim: int, theta: float
) -> tuple[np.ndarray, np.ndarray]:
    """cos and sin [1, count, 1, H] of positions from `start`, the sine as [-sin, sin]."""
    frequency = rope_frequencies(head_dim, theta)
    positions = np.arange(start, start + count, dtype=np.float32)
    angle = positions[:, None] * frequency
    cos, sin = np.cos(angle), np.sin(angle)
    tables = (np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1))
    return tables[0][None, :, None], tables[1][None, :, None]


def attention_mask(past: int, cache_size: int, count: int) -> np.ndarray:
    """Additive mask [1, 1, count, cache_size + count]: `past` cached positions, then causal."""
    mask = np.full((count, cache_size + count), MASKED, np.float32)
    mask[:, :past] = 0.0
    mask[:, cache_size:][np.tril_indices(count)] = 0.0
    return mask[None, None]
