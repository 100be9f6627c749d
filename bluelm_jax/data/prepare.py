"""Steps of the sample stream that run in worker processes; they pickle as what they are made of."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from bluelm_jax.data import images
from bluelm_jax.data.examples import Example, ExampleMaker, Skipped
from bluelm_jax.data.sources import Records
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
        if isinstance(made, Skipped) and made.reason == "unreadable_image":
            packed["planned"] = self._is_planned(*key)
        size = made.nbytes if isinstance(made, Example) else 0
        with self._lock:
            if size <= self._room and self._config.cache_mb and key not in self._cache:
                self._room -= size
                self._cache[key] = packed
        return packed

    def _make(self, source: int, index: int) -> Example | Skipped:
        config = self._config.sources[source]
        return self._maker.of_record(self._maker.make, self._records[source], index, config)

    def _is_planned(self, source: int, index: int) -> bool:
        """Whether a sample that was skipped is fine as far as headers tell."""
        config = self._config.sources[source]
        plan = self._maker.of_record(self._maker.make_plan, self._records[source], index, config)
        return not isinstance(plan, Skipped)


def keeps_its_row(tree: dict[str, Any]) -> bool:
    """Whether a skipped sample was reckoned with by those who see headers only.

    Its row stays empty then. If the next sample moved up, the rows that share tiles would not be
    those that `measure` found room for, nor those of a run with another tiling.
    """
    return bool(tree.get("planned"))


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
