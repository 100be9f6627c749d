"""Steps of the sample stream that run in worker processes; they pickle as what they are made of."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from bluelm_jax.data import images
from bluelm_jax.data.examples import Example, ExampleMaker, Skipped
from bluelm_jax.data.sources import InvalidRecordError, Records
from bluelm_jax.data_config import DataConfig

_MEGABYTE = 2**20
_ARRAYS = ("tokens", "supervised", "image_index", "tiles", "corner_index", "corner_weights")


class Key:
    """Turns a record's index into (source, index)."""

    def __init__(self, source: int):
        self._source = source

    def __call__(self, index: int) -> tuple[int, int]:
        """(source, index)."""
        return (self._source, int(index))


class Prepare:
    """Makes the example of a key, as a dict that crosses process borders; may remember it."""

    def __init__(self, maker: ExampleMaker, records: Sequence[Records], config: DataConfig):
        self._maker, self._records, self._config = maker, records, config
        self._forget()

    def _forget(self):
        images.keep_freed_pixels()  # Runs where the process that decodes starts.
        self._lock = threading.Lock()
        self._cache: dict[tuple[int, int], dict[str, Any]] = {}
        self._room = self._config.cache_mb * _MEGABYTE // max(1, self._config.num_workers)

    def __getstate__(self):
        return {k: self.__dict__[k] for k in ("_maker", "_records", "_config")}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._forget()

    def __call__(self, key: tuple[int, int]) -> dict[str, Any]:
        """The outcome for one record; `from_tree` turns it back."""
        cached = self._cache.get(key)
        if cached is not None:
            return cached
        made = self._make(*key)
        packed = _to_tree(made)
        size = made.nbytes if isinstance(made, Example) else 0
        with self._lock:
            if size <= self._room and self._config.cache_mb and key not in self._cache:
                self._room -= size
                self._cache[key] = packed
        return packed

    def _make(self, source: int, index: int) -> Example | Skipped:
        records = self._records[source]
        try:
            record = records[index]
        except InvalidRecordError as error:
            if self._config.on_invalid_record == "raise":
                raise
            return Skipped("invalid_record", str(error))
        return self._maker.make(record, self._config.sources[source], records.where(index))


def _to_tree(made: Example | Skipped) -> dict[str, Any]:
    # A dict of arrays: grain passes those between processes through shared memory.
    if isinstance(made, Skipped):
        return {"skipped": made.reason, "detail": made.detail}
    arrays = {name: getattr(made, name) for name in _ARRAYS if getattr(made, name) is not None}
    return {"name": made.name, "events": made.events, **arrays}


def from_tree(tree: dict[str, Any]) -> Example | Skipped:
    """The example, or the reason for its absence, that `Prepare` returned."""
    if "skipped" in tree:
        return Skipped(tree["skipped"], tree["detail"])
    arrays = {name: tree[name] for name in _ARRAYS if name in tree}
    return Example(name=tree["name"], events=tuple(map(tuple, tree["events"])), **arrays)
