"""How orbax writes a weight that never exists as a whole: `checkpoints.write_streamed` uses it.

Orbax hands each leaf of a tree to a handler of its type. This one writes the blocks of a leaf one
after another into the array that orbax would have written at once, so the result is restored like
any other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from orbax.checkpoint import future

# Bytes of blocks that may be on their way to the disk at one time.
IN_FLIGHT = 64 * 2**20

Block = tuple[tuple[slice, ...], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Streamed:
    """A weight that is written block by block.

    Attributes:
      shape: of the whole weight.
      dtype: of the whole weight.
      chunks: shape of the pieces that are stored; blocks must cover whole pieces.
      blocks: makes an iterator of (place, values), read when their turn comes.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    chunks: tuple[int, ...]
    blocks: Callable[[], Iterator[Block]]


class StreamHandler(ocp.type_handlers.NumpyHandler):
    """Writes `Streamed` leaves as NumPy arrays, one leaf and few blocks at a time.

    The writing happens in a thread of orbax, which may outlive whoever waits for it; `stop` ends it
    before the next block.
    """

    def __init__(self):
        super().__init__()
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Makes the writer give up."""
        self._stopped.set()

    async def serialize(
        self,
        values: Sequence[Any],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
    ) -> Sequence[Any]:
        """Starts the writing, which waits until orbax has made the directories."""
        writing = self._write_all(list(zip(values, infos, strict=True)))
        return [future.CommitFutureAwaitingContractedSignals(writing, name="stream")]

    async def _write_all(self, leaves: Sequence[tuple[Any, Any]]) -> None:
        for value, info in leaves:
            await info.await_path_creation()
            spec = ocp.type_handlers.get_json_tspec_write(
                info, use_ocdbt=True, global_shape=value.shape, local_shape=value.shape,
                dtype=value.dtype, process_index=0,
            )  # fmt: skip
            spec["metadata"]["chunks"] = list(value.chunks)
            store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
            await self._write(store, value)

    async def _write(self, store: ts.TensorStore, value: Streamed) -> None:
        pending, held = deque(), 0
        try:
            for place, block in value.blocks():
                if self._stopped.is_set():
                    raise InterruptedError("stopped")
                pending.append((store[place].write(block), block.nbytes))
                held += block.nbytes
                while held > IN_FLIGHT:
                    write, size = pending.popleft()
                    await write
                    held -= size
        finally:
            # Waits for all, also where one has failed: a late write would make its folder anew.
            ends = await asyncio.gather(*(w for w, _ in pending), return_exceptions=True)
        for end in ends:
            if isinstance(end, BaseException):
                raise end
