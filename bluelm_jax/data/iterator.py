"""Batches from a stream of prepared samples, with a state of a few integers."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from bluelm_jax.data import batching, packing, workers
from bluelm_jax.data.counters import Counters
from bluelm_jax.data.examples import Example, Skipped
from bluelm_jax.data.host_states import ALONE, Host, is_taken, still_needed
from bluelm_jax.data.prepare import from_tree, keeps_its_row
from bluelm_jax.data.workers import Stream
from bluelm_jax.data_config import DataConfig


class _Waiting(NamedTuple):
    """An example and its place in the order of all hosts."""

    place: int
    example: Example

    @property
    def length(self) -> int:
        return self.example.length

    @property
    def num_views(self) -> int:
        return self.example.num_views


class BatchIterator(grain.DatasetIterator):
    """Batches as dicts of NumPy arrays, with a state of a few integers.

    `get_state` and `set_state` give and take a JSON-able dict; grain's Orbax handler saves it.

    Args:
      examples: the outcome of every place of the order that all hosts share.
      shape: sizes of a batch.
      config: the data config.
      order_id: names the order of samples and, behind a '_', the records, so that a state is not
        used with others.
      num_records: records of all sources. When twice as many were left out one after the other, and
        whenever their number has doubled since, `any_used` is asked.
      any_used: whether the policies leave any record at all; if not, it is an error.
      period: of this host's places; so many left out one after the other are an error.
      host: which host this is among how many; it reads places host.rank + k * host.total.

    Attributes:
      counters: what was emitted, skipped, truncated and replaced so far.
      fill: `position_fill` and `tile_fill` of the last batch, shares of the room that it offers.
      placed: (row, place in the order of all hosts) of the last batch's samples; those of a row
        stand in this order.
    """

    def __init__(
        self,
        examples: grain.MapDataset,
        shape: batching.BatchShape,
        config: DataConfig,
        order_id: str,
        num_records: int,
        any_used: Callable[[], bool],
        period: int = sys.maxsize,
        host: Host = ALONE,
    ):
        super().__init__()
        self._examples, self._shape, self._config = examples, shape, config
        self._order_id, self._any_used, self._host = order_id, any_used, host
        self._period, self._patience = period, 2 * num_records
        self.counters = Counters(config.max_names)
        self.fill: dict[str, float] = {}
        self.placed: list[tuple[int, int]] = []
        self._place = 0  # The next place of this host's own.
        self._taken: list[dict[str, Any]] = []
        self._waiting: list[_Waiting] = []
        self._left_out = 0  # Samples left out since the last good one.
        self._reader: Stream | None = None
        self._interrupted = False
        self._state = self._current_state()

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch; StopIteration at the end of finite epochs."""
        self._assert_not_closed()
        if self._interrupted:
            self.set_state(self._state)
        self._interrupted = True  # Until the batch is whole; also after Ctrl-C or an error.
        filled = packing.fill(
            self._shape, self._config.packing, self._waiting, self._read, self._check_defer
        )
        self._waiting = filled.waiting
        if not filled.placed or (filled.partial and self._config.drop_remainder):
            self._interrupted = False
            raise StopIteration
        batch = self._emit([(row, item.example) for row, item in filled.placed])
        self.placed = [(row, item.place) for row, item in filled.placed]
        self._state, self._interrupted = self._current_state(), False
        return batch

    def _check_defer(
        self,
        item: _Waiting,
        packer: packing.FirstFit,
        placed: Sequence[tuple[int, _Waiting]],
    ) -> None:
        """Raises if tiles are what an example has no room for and the policy is to raise."""
        if self._config.packing is not None or self._config.on_full_group == "defer":
            return
        group = packer.full_group(item.length)
        if group is None:
            return
        mates = [each.example for row, each in placed if self._shape.group(row) == group]
        total = sum(each.num_views for each in mates) + item.num_views
        shown = [*mates, item.example][:20]
        names = "; ".join(f"{each.name} ({each.num_views})" for each in shown)
        raise ValueError(
            f"group {group} of a batch needs {total} tiles, tiles_per_group = "
            f"{self._shape.tiles_per_group}; samples (tiles): {names}"
        )

    def _emit(self, placed: Sequence[tuple[int, Example]]) -> dict[str, np.ndarray]:
        batch, shape = batching.assemble(placed, self._shape), self._shape
        positions = sum(example.length for _, example in placed)
        tiles = sum(example.num_views for _, example in placed)
        add = self.counters.add
        add("batches")
        add("samples", count=sum(example.length > 0 for _, example in placed))
        add("positions", count=positions)
        add("supervised", count=int(batch["loss_weights"].sum()))
        add("tiles", count=tiles)
        slots = shape.tile_groups * shape.tiles_per_group
        self.fill = {"position_fill": positions / (shape.batch_size * shape.seq_len)}
        if slots:
            self.fill["tile_fill"] = tiles / slots
        return batch

    def _read(self) -> _Waiting | None:
        """The next example that is not left out, counting what is; None at the end."""
        if self._reader is None:
            self._reader = self._open()
        for tree in self._reader:
            place = self._host.place(self._place)
            self._place += 1
            if is_taken(place, self._taken):
                continue
            made = from_tree(tree)
            if isinstance(made, Example):
                for reason, detail in made.events:
                    self.counters.add(reason, detail)
                self._left_out = 0
                return _Waiting(place, made)
            self.counters.add(made.reason, made.detail)
            self._left_out += 1
            if self._left_out > self._patience:  # An endless stream would never end.
                self._check_any_used(made.detail)
            if self._config.packing is None and keeps_its_row(tree):
                return _Waiting(place, batching.empty_example(self._shape, made.detail))
        return None

    def _check_any_used(self, detail: str) -> None:
        """Raises if nothing but left out samples can follow.

        A gap by itself says little: a source of small weight may hold the only good records.
        """
        if not self._any_used():
            raise ValueError(f"every sample is left out; the last one: {detail}")
        if self._left_out > self._period:
            raise ValueError(
                f"every sample of host {self._host} is left out, and without shuffle it never gets "
                f"another; the last one: {detail}"
            )
        self._patience = 2 * self._left_out

    def _open(self) -> Stream:
        mine = self._examples[self._host.rank :: self._host.total]
        return workers.open_stream(mine, self._place, self._config)

    def _current_state(self) -> dict[str, Any]:
        return {
            "order": self._order_id,
            "host": list(self._host),
            "place": self._place,
            "waiting": [item.place for item in self._waiting],
            "taken": self._taken,
            "counters": self.counters.state(),
        }

    def get_state(self) -> dict[str, Any]:
        """Where the stream stood after the last whole batch; JSON-able.

        It holds the next place of this host, the places (of all hosts' order) of samples that wait,
        what other numbers of hosts read before, and the counters. A batch that an error or Ctrl-C
        broke off does not show in it.
        """
        return copy.deepcopy(self._state)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state; the number of workers may differ, the order of samples not.

        Raises:
          ValueError: the state was taken from a different order of samples, from other records
            (states of before records were compared are taken), or from another host
            (`host_states.merge_states` turns the states of N hosts into those of M).
        """
        _check_order(state["order"], self._order_id)
        if tuple(state["host"]) != self._host:
            raise ValueError(
                f"the data state is of host {Host(*state['host'])}, this is host {self._host}: "
                "use merge_states"
            )
        self._close_reader()
        self._place = int(state["place"])
        self._taken = still_needed(state["taken"], self._host.place(self._place))
        made = [(int(p), self._example(int(p))) for p in state["waiting"]]
        self._waiting = [_Waiting(p, each) for p, each in made if isinstance(each, Example)]
        self.counters.restore(state["counters"])
        self._left_out = 0
        self._state, self._interrupted = self._current_state(), False

    def _example(self, place: int) -> Example | Skipped:
        tree: Any = self._examples[place]
        return from_tree(tree)

    def start_prefetch(self) -> None:
        """Starts reading ahead, so that the first batch waits less."""
        if self._reader is None:
            self._reader = self._open()
        start = getattr(self._reader, "start_prefetch", None)
        if start is not None:
            start()

    def _close_reader(self) -> None:
        close = getattr(self._reader, "close", None)
        if close is not None:
            close()
        self._reader = None

    def close(self) -> None:
        """Stops threads and worker processes."""
        if not self._closed:
            self._closed = True
            self._close_reader()


def _check_order(given: str, own: str) -> None:
    """Raises unless a state's order id fits this config's; one without records is of an old state."""
    order, _, records = given.partition("_")
    own_order, _, own_records = own.partition("_")
    if order != own_order:
        raise ValueError(
            f"the data state belongs to order {given}, this config has {own}: one of number of "
            "records, weights, seed, shuffle, epochs differs"
        )
    if records not in ("", own_records):
        raise ValueError(
            f"the data state was taken from other records (fingerprint {records}, here "
            f"{own_records}): a source has as many as then, but they differ; give the old data, or "
            "start a new run"
        )
