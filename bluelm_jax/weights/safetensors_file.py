"""Reading and writing safetensors files piece by piece, with nothing mapped into memory.

The format (github.com/huggingface/safetensors): 8 bytes with the length of a JSON header, the header
({name: {dtype, shape, data_offsets}}, and "__metadata__"), then the tensors' bytes, row-major,
little-endian, without gaps. A memory map would count every page read as resident, shard after shard;
plain reads into a buffer do not, and take dtypes that NumPy lacks.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from bluelm_jax.weights.plan import Shape, WeightsError

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
# Other types are read as far as the header goes: buffers that nobody wants may be integers.
_SIZES = {
    "F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2,
    "U16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
_MAX_HEADER = 100 * 2**20


@dataclasses.dataclass(frozen=True)
class Stored:
    """Where a tensor's bytes are.

    Attributes:
      path: file.
      code: dtype as the format writes it.
      shape: its shape.
      offset: of its first byte in the file.
    """

    path: Path
    code: str
    shape: Shape
    offset: int

    @property
    def dtype(self) -> np.dtype:
        """As NumPy knows it. WeightsError for types that are no weights of ours."""
        if self.code not in DTYPES:
            raise WeightsError(f"{self.path}: dtype {self.code} is not supported: {list(DTYPES)}")
        return DTYPES[self.code]

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start:stop of the tensor (all of a scalar)."""
        rows = self.shape[0] if self.shape else 1
        stop = rows if stop is None else min(stop, rows)
        shape = (stop - start, *self.shape[1:]) if self.shape else ()
        out = np.empty(shape, self.dtype)
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        try:
            _read_into(self.path, self.offset + start * row_bytes, out)
        except OSError as e:
            raise WeightsError(f"{self.path}: cannot be read: {e}") from e
        return out


def _read_into(path: Path, offset: int, out: np.ndarray) -> None:
    view = out.reshape(-1).view(np.uint8).data
    with path.open("rb", buffering=0) as f:
        f.seek(offset)
        done = 0
        while done < len(view):
            count = f.readinto(view[done:])
            if not count:
                raise WeightsError(f"{path}: ends {len(view) - done} bytes too early")
            done += count


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of a file, by name.

    Raises:
      WeightsError: the file is no safetensors file, or shorter or longer than its header says.
    """
    size = path.stat().st_size
    with path.open("rb") as f:
        head = f.read(8)
        length = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise WeightsError(f"{path}: not a safetensors file, or cut off in its header")
        text = f.read(length)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        start = 8 + length
        found = {name: _stored(path, name, entry, start) for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        if isinstance(e, WeightsError):
            raise
        raise WeightsError(f"{path}: damaged safetensors header: {e!r}") from e
    end = start + _check_contiguous(path, header)
    if end != size:
        state = "cut off (an unfinished download?)" if size < end else "too long"
        raise WeightsError(f"{path}: {state}: {size:,} bytes, its header promises {end:,}")
    return found


def _check_contiguous(path: Path, header: Mapping[str, Mapping]) -> int:
    """Bytes of all tensors. WeightsError if two overlap or bytes lie between them."""
    end, before = 0, "the start"
    for begin, stop, name in sorted((*entry["data_offsets"], k) for k, entry in header.items()):
        if begin != end or stop < begin:
            fault = "overlaps" if begin < end or stop < begin else "leaves a gap after"
            raise WeightsError(
                f"{path}: damaged safetensors header: {name}, bytes {begin} to {stop}, {fault} "
                f"{before}, which ends at {end}"
            )
        end, before = stop, name
    return end


def _stored(path: Path, name: str, entry: Mapping, start: int) -> Stored:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(n) is int for n in (begin, end, *shape)):
        raise WeightsError(f"{path}: {name}: {[begin, end]}, shape {shape}: no whole numbers")
    code = entry["dtype"]
    expected = math.prod(shape) * _SIZES.get(code, 0)
    if code in _SIZES and (min(shape, default=0) < 0 or begin < 0 or end - begin != expected):
        raise WeightsError(f"{path}: {name}: {end - begin} bytes for shape {list(shape)} of {code}")
    return Stored(path, code, shape, start + begin)


class Writer:
    """A safetensors file whose tensors are filled in any order.

    Args:
      path: the file, which must not exist.
      tensors: shape and dtype of each, in the order of the file.
    """

    def __init__(self, path: Path, tensors: Mapping[str, tuple[Shape, np.dtype]]):
        header: dict = {"__metadata__": {"format": "pt"}}  # Readers of transformers ask for it.
        end = 0
        for name, (shape, dtype) in tensors.items():
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [begin, end],
            }  # fmt: skip
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.path, self.size = path, end
        self._offsets = {name: header[name]["data_offsets"] for name in tensors}
        self._start = 8 + len(text)
        self._file: BinaryIO = path.open("xb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        # Reserved now, so that a disk that is too small fails at once.
        self._reserve(self._start + end)

    def _reserve(self, size: int) -> None:
        self._file.flush()
        try:
            os.posix_fallocate(self._file.fileno(), 0, size)
        except (AttributeError, OSError) as e:
            if getattr(e, "errno", None) == errno.ENOSPC:
                raise
            self._file.truncate(size)  # A file system that cannot reserve.

    def write(self, name: str, values: np.ndarray) -> None:
        """Fills one tensor."""
        begin, end = self._offsets[name]
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        if len(data) != end - begin:
            raise ValueError(f"{name}: {len(data)} bytes, {end - begin} expected")
        self._file.seek(self._start + begin)
        self._file.write(data.data)

    def close(self) -> None:
        """Ends the file."""
        self._file.close()
