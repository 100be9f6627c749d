"""Batches from a stream of prepared samples, with a state of a few integers."""

from __future__ import annotations

import copy
import signal
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from absl import flags

from bluelm_jax.data import batching
from bluelm_jax.data.counters import Counters
from bluelm_jax.data.examples import Example, Skipped
from bluelm_jax.data.prepare import from_tree
from bluelm_jax.data_config import DataConfig


class _Waiting(NamedTuple):
    """An example and its place in the stream."""

    place: int
    example: Example


def _leave_interrupts_to_the_main_process(worker: int, count: int) -> None:
    """A terminal sends Ctrl-C to workers too, where it would break off what the main one waits for."""
    del worker, count
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class BatchIterator(grain.DatasetIterator):
    """Batches as dicts of NumPy arrays, with a state of a few integers.

    `get_state` and `set_state` give and take a JSON-able dict; grain's Orbax handler saves it.

    Args:
      examples: the outcome of every place of the stream.
      shape: sizes of a batch.
      config: the data config.
      order_id: names the order of samples, so that a state is not used with another one.
      num_records: records of all sources; so many left out one after the other are an error.

    Attributes:
      counters: what was emitted, skipped, truncated and replaced so far.
    """

    def __init__(
        self,
        examples: grain.MapDataset,
        shape: batching.BatchShape,
        config: DataConfig,
        order_id: str,
        num_records: int,
    ):
        super().__init__()
        self._examples, self._shape, self._config = examples, shape, config
        self._order_id, self._num_records = order_id, num_records
        self.counters = Counters(config.max_names)
        self._place = 0
        self._waiting: list[_Waiting] = []
        self._reader = None
        self._interrupted = False
        self._state = self._current_state()

    def __next__(self) -> dict[str, np.ndarray]:
        """The next batch; StopIteration at the end of finite epochs."""
        self._assert_not_closed()
        if self._interrupted:
            self.set_state(self._state)
        self._interrupted = True  # Until the batch is whole; also after Ctrl-C or an error.
        placed, remainder = self._fill()
        if not placed or (remainder and self._config.drop_remainder):
            self._interrupted = False
            raise StopIteration
        batch = self._emit(placed)
        self._state, self._interrupted = self._current_state(), False
        return batch

    def _fill(self) -> tuple[list[tuple[int, Example]], bool]:
        """Samples of one batch with their rows; True if the data ended before it was full."""
        packer = batching.Packer(self._shape)
        placed: list[tuple[int, Example]] = []
        waiting: list[_Waiting] = []
        queue, self._waiting = self._waiting, []
        limit = 1 if self._config.packing is None else self._config.packing.lookahead
        ended = False
        while not packer.is_full and len(waiting) < limit and not ended:
            item = queue.pop(0) if queue else self._read()
            if item is None:
                ended = True
                continue
            row = packer.place(item.example.length, item.example.num_views)
            if row is None:
                self._check_defer(item.example, packer, placed)
                waiting.append(item)
            else:
                placed.append((row, item.example))
        self._waiting = waiting + queue
        return placed, ended and not self._waiting

    def _check_defer(
        self, example: Example, packer: batching.Packer, placed: Sequence[tuple[int, Example]]
    ) -> None:
        """Raises if tiles are what an example has no room for and the policy is to raise."""
        if self._config.packing is not None or self._config.on_full_group == "defer":
            return
        group = packer.full_group(example.length)
        if group is None:
            return
        mates = [each for row, each in placed if self._shape.group(row) == group]
        total = sum(each.num_views for each in mates) + example.num_views
        names = "; ".join(f"{each.name} ({each.num_views})" for each in [*mates, example][:20])
        raise ValueError(
            f"group {group} of a batch needs {total} tiles, tiles_per_group = "
            f"{self._shape.tiles_per_group}; samples (tiles): {names}"
        )

    def _emit(self, placed: Sequence[tuple[int, Example]]) -> dict[str, np.ndarray]:
        batch = batching.assemble(placed, self._shape)
        add = self.counters.add
        add("batches")
        add("samples", count=len(placed))
        add("positions", count=sum(example.length for _, example in placed))
        add("supervised", count=int(batch["loss_weights"].sum()))
        add("tiles", count=sum(example.num_views for _, example in placed))
        return batch

    def _read(self) -> _Waiting | None:
        """The next example that is not left out, counting what is; None at the end."""
        if self._reader is None:
            self._reader = self._open()
        skipped = 0
        for tree in self._reader:
            place, self._place = self._place, self._place + 1
            made = from_tree(tree)
            if isinstance(made, Skipped):
                self.counters.add(made.reason, made.detail)
                skipped += 1
                if skipped > 2 * self._num_records:  # An endless stream would never end.
                    raise ValueError(f"every sample is left out; the last one: {made.detail}")
                continue
            for reason, detail in made.events:
                self.counters.add(reason, detail)
            return _Waiting(place, made)
        return None

    def _open(self) -> Iterator[dict[str, Any]]:
        config = self._config
        if self._place >= len(self._examples):
            return iter(())
        threads, ahead = config.num_threads, max(config.num_threads, config.prefetch)
        options = grain.ReadOptions(threads, ahead if threads else 0)
        stream = self._examples[self._place :].to_iter_dataset(options)
        if config.num_workers:
            # Grain reads absl flags to start workers; a plain script has not parsed any.
            if not flags.FLAGS.is_parsed():
                flags.FLAGS.mark_as_parsed()
            stream = stream.mp_prefetch(
                grain.MultiprocessingOptions(
                    num_workers=config.num_workers,
                    per_worker_buffer_size=max(1, config.prefetch),
                ),
                worker_init_fn=_leave_interrupts_to_the_main_process,
            )
        return iter(stream)

    def _current_state(self) -> dict[str, Any]:
        return {
            "order": self._order_id,
            "place": self._place,
            "waiting": [item.place for item in self._waiting],
            "counters": self.counters.state(),
        }

    def get_state(self) -> dict[str, Any]:
        """Where the stream stood after the last whole batch; JSON-able.

        It holds the next place, the places of samples that wait, and the counters. A batch that an
        error or Ctrl-C broke off does not show in it.
        """
        return copy.deepcopy(self._state)

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues from a state; the number of workers may differ, the order of samples not.

        Raises:
          ValueError: the state was taken from a different order of samples.
        """
        if state["order"] != self._order_id:
            raise ValueError(
                f"the data state belongs to order {state['order']}, this config has "
                f"{self._order_id}: records, weights, seed, shuffle, epochs or hosts differ"
            )
        self._close_reader()
        self._place = int(state["place"])
        made = [(int(p), self._example(int(p))) for p in state["waiting"]]
        self._waiting = [_Waiting(p, each) for p, each in made if isinstance(each, Example)]
        self.counters.restore(state["counters"])
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
