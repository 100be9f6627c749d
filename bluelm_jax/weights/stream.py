"""Weights of a folder as blocks of some megabytes, for `checkpoints.write_streamed`.

A block is some rows of one tensor. Since a linear layer is stored transposed, its rows are our last
axis; the pieces of the checkpoint are cut the same way, so nothing is read or written twice.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator

import jax
import numpy as np

from bluelm_jax import params, vision
from bluelm_jax.checkpoint_stream import Block, Streamed
from bluelm_jax.params import Param
from bluelm_jax.weights import convert
from bluelm_jax.weights.folder import Folder
from bluelm_jax.weights.plan import Plan, Read, WeightsError

BLOCK_BYTES = 16 * 2**20
# Bits of the exponent by width: all of them set means an infinity or not a number.
_EXPONENT = {4: np.uint32(0x7F800000), 2: np.uint16(0x7F80)}
_EXPONENT_F16 = np.uint16(0x7C00)


@dataclasses.dataclass
class Watch:
    """What is seen while weights go by.

    Attributes:
      progress: called with the bytes written so far.
      done: those bytes.
      not_finite: number of values that are no finite numbers, by weight.
    """

    progress: Callable[[int], None] = lambda _: None
    done: int = 0
    not_finite: dict[str, int] = dataclasses.field(default_factory=dict)

    def see(self, path: str, block: np.ndarray) -> None:
        """Counts one block of a weight."""
        bad = count_not_finite(block)
        if bad:
            self.not_finite[path] = self.not_finite.get(path, 0) + bad
        self.done += block.nbytes
        self.progress(self.done)


def count_not_finite(x: np.ndarray) -> int:
    """Infinities and NaNs among floating point numbers, from their bits."""
    bits = np.ascontiguousarray(x).view(f"u{x.dtype.itemsize}")
    mask = _EXPONENT_F16 if x.dtype == np.float16 else _EXPONENT[x.dtype.itemsize]
    return int(np.count_nonzero((bits & mask) == mask))


def imported(
    folder: Folder, plan: Plan, dtype: np.dtype | None, watch: Watch
) -> dict[str, Streamed]:
    """The planned weights by path, in `dtype` or (None) as stored."""
    return {read.entry.path: _imported_one(folder, read, dtype, watch, plan) for read in plan.reads}


def _imported_one(
    folder: Folder, read: Read, dtype: np.dtype | None, watch: Watch, plan: Plan
) -> Streamed:
    tensors = [folder.tensors[name] for name in read.names]
    target = dtype or convert.widest([stored.dtype for stored in tensors])
    path = f"{plan.part.name}/{read.entry.path}"
    linear, whole = read.entry.transform == "linear", read.entry.transform == "patch"
    source = tensors[0].shape
    row_bytes = math.prod(source[1:]) * target.itemsize
    rows = source[0] if whole else min(source[0], max(1, BLOCK_BYTES // row_bytes))
    piece = read.shape if whole else (read.shape[0], rows) if linear else (rows, *read.shape[1:])

    def blocks() -> Iterator[Block]:
        for layer, stored in enumerate(tensors):
            for start in range(0, source[0], rows):
                x = stored.read(start, start + rows).astype(target, copy=False)
                x = convert.to_ours(x, read.entry.transform, read.shape)
                watch.see(path, x)
                along = slice(start, start + x.shape[-1 if linear else 0])
                rest = (slice(None),) * (len(read.shape) - 1)
                place = (slice(None),) * len(read.shape)
                if not whole:
                    place = (*rest, along) if linear else (along, *rest)
                if read.entry.stacked:
                    yield (slice(layer, layer + 1), *place), x[None]
                else:
                    yield place, x

    chunks = (1, *piece) if read.entry.stacked else piece
    return Streamed(read.param.shape, target, chunks, blocks)


def whole(path: str, shape: tuple[int, ...], dtype: np.dtype, watch: Watch, make) -> Streamed:
    """A weight that `make()` gives at once."""

    def blocks() -> Iterator[Block]:
        x = np.asarray(make()).astype(dtype, copy=False)
        watch.see(path, x)
        yield (slice(None),) * len(shape), x

    return Streamed(shape, dtype, shape, blocks)


def drawn(path: str, p: Param, seed: int, dtype: np.dtype, watch: Watch) -> Streamed:
    """The value that `params.init` draws for this path and seed."""

    def make() -> np.ndarray:
        tree = params.init(convert.nest({path: p}), jax.random.key(seed))
        return np.asarray(jax.tree.leaves(tree)[0])

    return whole(path, p.shape, dtype, watch, make)


def resized_positions(path: str, table: Streamed, side: int, watch: Watch) -> Streamed:
    """A tower's position embeddings, interpolated for tiles of another size."""

    def make() -> np.ndarray:
        rows = np.concatenate([block for _, block in table.blocks()])
        watch.done -= rows.nbytes  # These bytes are not written.
        return vision.resize_positions(rows, side)

    return whole(path, (side**2, table.shape[1]), table.dtype, watch, make)


def check_twins(folder: Folder, plan: Plan) -> None:
    """Raises WeightsError if tensors that must be equal (a tied head) are not, bit for bit."""
    for copy, original in plan.twins:
        a, b = folder.tensors[copy], folder.tensors[original]
        same = a.shape == b.shape and a.code == b.code
        rows = max(1, BLOCK_BYTES // max(1, math.prod(a.shape[1:]) * 4))
        for start in range(0, a.shape[0] if same else 0, rows):
            x, y = (t.read(start, start + rows) for t in (a, b))
            same = same and convert.same_bits(x, y)
        if not same:
            raise WeightsError(
                f"{folder.path}: {copy} differs from {original}, but config.json ties them "
                "(tie_word_embeddings)"
            )
