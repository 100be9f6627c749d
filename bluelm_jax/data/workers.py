"""Threads and processes that prepare samples ahead of the batches.

Worker processes hand arrays over through shared memory: grain copies each into a block that the
main process maps, so tiles are never pickled.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
from absl import flags

from bluelm_jax.data import worker_process
from bluelm_jax.data_config import DataConfig

Stream = Iterator[dict[str, Any]]

# A block of shared memory costs three system calls on either side; small arrays are pickled.
LEAST_SHARED_BYTES = 2**16


def open_stream(examples: grain.MapDataset, start: int, config: DataConfig) -> Stream:
    """Prepared samples from place `start` on, in their order whatever the number of workers."""
    if start >= len(examples):
        return iter(())
    threads, ahead = config.num_threads, max(config.num_threads, config.prefetch)
    options = grain.ReadOptions(threads, ahead if threads else 0)
    stream = examples[start:].to_iter_dataset(options)
    if not config.num_workers:
        return iter(stream)
    # Grain reads absl flags to start workers; a plain script has not parsed any.
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()
    shared = grain.experimental.DatasetOptions(min_shm_size=LEAST_SHARED_BYTES)
    stream = grain.experimental.WithOptionsIterDataset(stream, shared)
    processes = grain.MultiprocessingOptions(
        num_workers=config.num_workers, per_worker_buffer_size=max(1, config.prefetch)
    )
    return iter(stream.mp_prefetch(processes, worker_init_fn=_start_worker))


def _start_worker(worker: int, count: int) -> None:
    del worker, count
    worker_process.follow_parent()
