"""The next batch is made and put on the devices while they are busy with a step.

JAX starts a step and returns at once. So the loop asks for the next batch between starting a step
and looking at its result, and needs no thread of its own: what was read ahead belongs to a batch
object, and a checkpoint takes the data state of the batch that was trained on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from bluelm_jax.batch import Batch
from bluelm_jax.data.pipeline import BatchIterator


@dataclasses.dataclass(frozen=True)
class Fetched:
    """A batch on the devices.

    Attributes:
      batch: its arrays.
      state: the data state right after it: what a run that has trained on it continues from.
      fill: shares of this host's positions and tile slots in use.
    """

    batch: Batch
    state: dict[str, Any]
    fill: dict[str, float]


class DevicePrefetch:
    """One batch ahead of the training loop.

    Args:
      batches: where batches come from.
      put: puts a host's arrays on its devices; it must not wait for them to arrive.
    """

    def __init__(self, batches: BatchIterator, put: Callable[[dict[str, np.ndarray]], Batch]):
        self._batches, self._put = batches, put
        self._ahead: Fetched | Exception | None = None

    def fetch(self) -> None:
        """Makes the next batch unless it is there. An error waits until the batch is taken."""
        if self._ahead is not None:
            return
        try:
            arrays = next(self._batches)
            fill, state = self._batches.fill, self._batches.get_state()
            self._ahead = Fetched(self._put(arrays), state, fill)
        except Exception as error:  # The step before it is whole, and may still be saved.
            self._ahead = error

    def take(self) -> Fetched:
        """The next batch.

        Raises:
          StopIteration: the data have ended. Errors of the pipeline come here as well.
        """
        self.fetch()
        fetched, self._ahead = self._ahead, None
        if isinstance(fetched, Exception):
            raise fetched
        assert fetched is not None
        return fetched
