"""Writing tensors as one safetensors file or as numbered shards with an index."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bluelm_jax.weights.folder import INDEX, SINGLE
from bluelm_jax.weights.plan import Shape
from bluelm_jax.weights.safetensors_file import Writer

Tensors = Mapping[str, tuple[Shape, np.dtype]]


def _size(shape: Shape, dtype: np.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _split(tensors: Tensors, max_bytes: int) -> list[dict[str, tuple[Shape, np.dtype]]]:
    """Tensors by shard, in their order; a tensor above the limit has a shard of its own."""
    shards: list[dict[str, tuple[Shape, np.dtype]]] = [{}]
    room = max_bytes
    for name, described in tensors.items():
        size = _size(*described)
        if size > room and shards[-1]:
            shards.append({})
            room = max_bytes
        shards[-1][name] = described
        room -= size
    return shards


class ShardWriter:
    """Tensors of a folder, filled in any order, one at a time.

    Args:
      folder: where; it must hold no weights yet.
      tensors: shape and dtype of each.
      max_bytes: the most that one file holds, unless a single tensor is larger.
    """

    def __init__(self, folder: Path, tensors: Tensors, max_bytes: int):
        shards = _split(tensors, max_bytes)
        single = len(shards) == 1
        self._writers: dict[str, Writer] = {}
        self._files: list[Writer] = []
        weight_map = {}
        for i, shard in enumerate(shards, 1):
            name = SINGLE if single else f"model-{i:05}-of-{len(shards):05}.safetensors"
            writer = Writer(folder / name, shard)
            self._files.append(writer)
            self._writers |= dict.fromkeys(shard, writer)
            weight_map |= dict.fromkeys(shard, name)
        if not single:
            total = sum(_size(*described) for described in tensors.values())
            index = {"metadata": {"total_size": total}, "weight_map": weight_map}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def write(self, name: str, values: np.ndarray) -> None:
        """Fills one tensor."""
        self._writers[name].write(name, values)

    def close(self) -> None:
        """Ends all files."""
        for file in self._files:
            file.close()
