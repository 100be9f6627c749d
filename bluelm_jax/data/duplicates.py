"""Which of many records repeat an earlier one, from eight bytes of hash for each comparison."""

from __future__ import annotations

import array
import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


def key(data: bytes) -> int:
    """64-bit hash of `data`, never 0, which stands for "nothing to compare".

    Among 50 million different items the chance that any two share a key is below 1e-4.
    """
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") or 1


class ImageKey(NamedTuple):
    """Keys of an image: of its content, of the file as such, and of its name in the record."""

    content: int
    file: int
    name: int


class Duplicate(NamedTuple):
    """A record and the first one like it, by their number in order of adding.

    `name` is the key of the image's name in its record; 0 where no image is meant.
    """

    kind: str
    again: int
    first: int
    name: int = 0


class Duplicates:
    """Collects the keys of records in order: 16 bytes a record and 32 an image."""

    def __init__(self):
        self._ids, self._samples = array.array("Q"), array.array("Q")
        self._images, self._names, self._owners, self._files = (array.array("Q") for _ in range(4))

    def add(self, id_key: int, sample_key: int, image_keys: Sequence[ImageKey]) -> None:
        """Adds the next record: keys of its id, its content, and of its images."""
        for content, file, name in image_keys:
            self._files.append(file)
            self._images.append(content)
            self._names.append(name)
            self._owners.append(len(self._ids))
        self._ids.append(id_key)
        self._samples.append(sample_key)

    def find(self) -> Iterator[Duplicate]:
        """Every record that repeats an earlier one, kind by kind."""
        for again, first in repeats(_view(self._ids)):
            yield Duplicate("duplicate_id", again, first)
        for again, first in repeats(_view(self._samples)):
            yield Duplicate("duplicate_sample", again, first)
        for again, first in repeats(_view(self._images)):
            if self._files[again] != self._files[first]:
                owners = self._owners[again], self._owners[first]
                yield Duplicate("duplicate_image", *owners, self._names[again])


def _view(keys: array.array) -> np.ndarray:
    return np.frombuffer(keys, np.uint64) if keys else np.zeros(0, np.uint64)


def repeats(keys: np.ndarray) -> list[tuple[int, int]]:
    """(again, first) for every index whose key an earlier one has, in order; key 0 is none.

    Args:
      keys: uint64 [n].
    """
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    again = np.zeros(len(keys), bool)
    again[1:] = (ordered[1:] == ordered[:-1]) & (ordered[1:] != 0)
    starts = np.maximum.accumulate(np.where(again, 0, np.arange(len(keys))))
    pairs = np.stack([order[again], order[starts[again]]], axis=1)
    return [(int(a), int(f)) for a, f in pairs[np.argsort(pairs[:, 0])]]
