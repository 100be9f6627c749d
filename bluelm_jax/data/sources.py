"""Files of records with random access, read through a memory map.

A source knows where each record lies in its file and parses one record when it is asked for it.
The bytes belong to the page cache, which all worker processes share; what a process keeps itself
is the offset index, 16 bytes a record, or nothing when the index lies in a file as well
(`index_dir`). Sources pickle as their paths and open again in the worker.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from bluelm_jax.data import json_index
from bluelm_jax.data.image_bytes import ImageBytes

_INDEX_VERSION = (
    2  # Part of an index file's name: an older rule's index is not taken for this one's.
)
_SHOWN = 100  # Characters of a value that a message quotes.


class InvalidRecordError(ValueError):
    """A record that cannot become a sample; the message names it.

    Attributes:
      kind: which rule it breaks, one of `findings.KINDS`.
      place: where in the record, such as 'turn 2'; '' where it is the record as a whole.
    """

    def __init__(self, message: str, kind: str = "invalid_record", place: str = ""):
        super().__init__(message)
        self.kind, self.place = kind, place


@runtime_checkable
class Records(Protocol):
    """Random access to records; `where(i)` names one for error messages."""

    def __len__(self) -> int:
        """Number of records."""
        ...

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        """Record `index`, 0 <= index < len."""
        ...

    def where(self, index: int) -> str:
        """File and place of record `index`."""
        ...


class MemoryRecords:
    """Records that are already in memory."""

    def __init__(self, records: Sequence[Mapping[str, Any]], name: str = "memory"):
        self._records, self._name = records, name

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._records[index]

    def where(self, index: int) -> str:
        """Name of the list and index."""
        return f"{self._name}[{index}]"


class FileRecords:
    """A JSON array (`.json`) or JSON lines (`.jsonl`) file in UTF-8.

    Args:
      path: the file; the kind is told by its first character, not by its name. A byte order mark,
        lines that end in CR LF and blank lines are fine.
      index_dir: folder to keep the offset index in; it is written once for each state (size and
        time of change) of the file and memory mapped by every process.

    Raises:
      ValueError: the file is missing, empty, compressed, not UTF-8, cut off, or goes on behind the
        array; the message names file and byte.
    """

    def __init__(self, path: str | os.PathLike[str], index_dir: str | None = None):
        self._path, self._index_dir = str(path), index_dir
        self._open()
        self._spans = self._load_spans()

    def _open(self):
        path = pathlib.Path(self._path)
        if not path.is_file():
            raise ValueError(f"{path}: no such file")
        if path.stat().st_size == 0:
            raise ValueError(f"{path}: the file is empty")
        with path.open("rb") as file:
            self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["_bytes"]
        if self._index_dir is not None:
            del state["_spans"]
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._open()
        if self._index_dir is not None:
            self._spans = self._load_spans()

    def _load_spans(self) -> np.ndarray:
        """Start and end byte of each record, int64 [records, 2]."""
        if self._index_dir is None:
            return self._find_spans()
        stat = os.stat(self._path)
        key = f"{_INDEX_VERSION} {os.path.abspath(self._path)} {stat.st_size} {stat.st_mtime_ns}"
        name = hashlib.sha256(key.encode()).hexdigest()[:24] + ".npy"
        index = pathlib.Path(self._index_dir) / name
        if not index.exists():
            index.parent.mkdir(parents=True, exist_ok=True)
            partial = index.with_suffix(f".{os.getpid()}.partial.npy")
            np.save(partial, self._find_spans())
            partial.rename(index)  # Atomic: no process ever maps half an index.
        return np.load(index, mmap_mode="r")

    def _find_spans(self) -> np.ndarray:
        return json_index.find_spans(self._bytes, self._path)

    def __len__(self) -> int:
        return len(self._spans)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        start, end = (int(at) for at in self._spans[index])
        try:
            record = json.loads(self._bytes[start:end])
        except (ValueError, RecursionError) as error:
            message = f"{self.where(index)}: not valid JSON: {error}"
            raise InvalidRecordError(message, "broken_json") from error
        if not isinstance(record, dict):
            what = f"a record must be an object, got {type(record).__name__}"
            raise InvalidRecordError(f"{self.where(index)}: {what}", "not_an_object")
        return record

    def where(self, index: int) -> str:
        """Path, index and first byte of a record."""
        return f"{self._path}[{index}] (byte {int(self._spans[index][0])})"


def shown(value: Any) -> str:
    """`repr(value)` for a message, shortened where it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def sample_name(record: Mapping[str, Any], where: str) -> str:
    """How messages call a sample: its id, if it has one, and where it stands."""
    return f"sample {shown(record['id'])} of {where}" if "id" in record else f"sample {where}"


def image_files(record: Mapping[str, Any], name: str) -> list[str | ImageBytes]:
    """The `image` entry as a list; absent, None, '' and [] are a sample without images.

    Entries are paths, or the bytes of a file where the source holds those.
    """
    entry = record.get("image")
    single = isinstance(entry, str | ImageBytes) and entry != ""
    files: Any = [entry] if single else entry or []
    if not isinstance(files, list) or not all(isinstance(f, str | ImageBytes) and f for f in files):
        message = f"{name}: 'image' must be a path or list of paths, got {shown(entry)}"
        raise InvalidRecordError(message, "bad_image_entry", "image")
    return files
