"""ArrayRecord files of LLaVA records, with or without the bytes of their images.

One ArrayRecord record is one LLaVA record, in one of two forms:

* JSON text in UTF-8, from its `{` on. Images are files elsewhere.
* A head of 13 bytes (`llavarec`, the version 1 in one byte, the length of the JSON text in four,
  little-endian), the JSON text `{"record": {...}, "image_bytes": [n1, n2, ...]}`, and then the
  images' files, one after the other, of n1, n2, ... bytes, in the order of the record's `image`.

So a host reads shards and nothing else, at random, and any program can take a record apart. A folder
of shards has a `manifest.json` that `experiments.prepare_data` writes last.
"""

from __future__ import annotations

import importlib
import json
import pathlib
import re
import struct
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bluelm_jax.data.image_bytes import ImageBytes
from bluelm_jax.data.sources import InvalidRecordError, image_files

VERSION = 1
MANIFEST = "manifest.json"
FORMAT = "bluelm_jax ArrayRecord shards"

_HEAD = struct.Struct("<8sBI")
_MAGIC = b"llavarec"
# Random access: nothing is read ahead, and in no thread pool.
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


class DamagedShardError(ValueError):
    """A shard whose bytes are not those that were written; no policy leaves this out."""


def encode(record: Mapping[str, Any], images: Sequence[bytes] = ()) -> bytes:
    """The bytes of a record, with its images' files behind it if given.

    Raises:
      ValueError: other images than the record names.
      InvalidRecordError: it holds what JSON cannot.
    """
    if not images:
        return _to_json(record)
    named = len(image_files(record, "record"))
    if named != len(images):
        raise ValueError(f"{len(images)} images for a record that names {named}")
    text = _to_json({"record": record, "image_bytes": [len(data) for data in images]})
    return b"".join((_HEAD.pack(_MAGIC, VERSION, len(text)), text, *images))


def _to_json(value: Any) -> bytes:
    # Half a surrogate pair survives, for the policy of whoever reads it.
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    except TypeError as error:  # Of a table, such as a time as id.
        raise InvalidRecordError(f"cannot be written as JSON: {error}") from error
    return text.encode("utf-8", "surrogatepass")


def decode(data: bytes, where: str) -> dict[str, Any]:
    """The record of `encode`; images that stand behind it become `ImageBytes`.

    Raises:
      InvalidRecordError: the bytes are something else; the message starts with `where`.
    """
    embedded = data.startswith(_MAGIC)
    text, sizes = data, []
    if embedded:
        text = _embedded_text(data, where)
    try:
        record = json.loads(text)
        if embedded:
            record, sizes = record["record"], record["image_bytes"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidRecordError(f"{where}: not valid JSON: {error}", "broken_json") from error
    if not isinstance(record, dict):
        what = f"a record must be an object, got {type(record).__name__}"
        raise InvalidRecordError(f"{where}: {what}", "not_an_object")
    return record | {"image": _cut_images(record, data, sizes, where)} if embedded else record


def _embedded_text(data: bytes, where: str) -> bytes:
    if len(data) < _HEAD.size:
        raise InvalidRecordError(f"{where}: cut off after {len(data)} bytes", "broken_json")
    _, version, length = _HEAD.unpack_from(data)
    if version != VERSION:
        raise InvalidRecordError(f"{where}: version {version}, this code reads {VERSION}")
    return data[_HEAD.size : _HEAD.size + length]


def _cut_images(
    record: Mapping[str, Any], data: bytes, sizes: Sequence[int], where: str
) -> list[ImageBytes]:
    names = image_files(record, where)
    if len(names) != len(sizes):
        raise InvalidRecordError(f"{where}: {len(sizes)} images behind {len(names)} names")
    at = len(data) - sum(sizes)
    if at < _HEAD.size:
        raise InvalidRecordError(f"{where}: {len(data)} bytes, but images of {sum(sizes)}")
    images = []
    for name, size in zip(names, sizes, strict=True):
        images.append(ImageBytes(str(name), data[at : at + size], where))
        at += size
    return images


def array_record_module() -> Any:
    """The package that reads and writes ArrayRecord.

    Raises:
      ValueError: it is not installed; the message says how to.
    """
    try:
        return importlib.import_module("array_record.python.array_record_module")
    except ImportError as error:
        raise ValueError(f"ArrayRecord needs `pip install array_record` ({error})") from error


class ArrayRecords:
    """Random access to the records of ArrayRecord files, one file after the other.

    A process opens a file when it first reads from it, and then holds the file's own index: 8 bytes
    for each group of records (`prepare_data` puts 16 in a group, or 1 with embedded images).
    Pickles as names and counts.

    Args:
      files: the files.
      counts: records of each; None asks the files.

    Raises:
      ValueError: a file is missing or no ArrayRecord file.
    """

    def __init__(self, files: Sequence[str], counts: Sequence[int] | None = None):
        self._files = tuple(map(str, files))
        self._reset()
        if counts is None:
            counts = [self._count(i) for i in range(len(self._files))]
        self._ends = np.cumsum(np.asarray(counts, np.int64))

    def _reset(self):
        self._lock = threading.Lock()
        self._readers: list[Any] = [None] * len(self._files)

    def __getstate__(self):
        return {"_files": self._files, "_ends": self._ends}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._reset()

    def _count(self, file: int) -> int:
        with self._lock:
            return self._reader(file).num_records()

    def _reader(self, file: int):
        reader = self._readers[file]
        if reader is None:
            path = self._files[file]
            if not pathlib.Path(path).is_file():
                raise ValueError(f"{path}: no such file")
            reader = array_record_module().ArrayRecordReader(
                path, options=_READER_OPTIONS, file_reader_buffer_size=2**15
            )
            if not reader.ok():
                raise ValueError(f"{path}: not an ArrayRecord file, or cut off")
            self._readers[file] = reader
        return reader

    def _find(self, index: int) -> tuple[int, int]:
        """File of a record, and its place there."""
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        file = int(np.searchsorted(self._ends, index, "right"))
        return file, index - (int(self._ends[file - 1]) if file else 0)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        file, place = self._find(index)
        with self._lock:
            reader = self._reader(file)
            try:
                reader.seek(place)
                data = reader.read()
            except (RuntimeError, IndexError) as error:
                self._readers[file] = None  # One that failed reads nothing any more.
                raise DamagedShardError(self._damage(file, place, reader, error)) from error
        return decode(data, self.where(index))

    def _damage(self, file: int, place: int, reader: Any, error: Exception) -> str:
        """Names the shard and the records that share the damaged piece with record `place`."""
        count = int(self._ends[file]) - (int(self._ends[file - 1]) if file else 0)
        found = re.search(r"group_size:(\d+)", str(reader.writer_options_string()))
        size = int(found[1]) if found else 1
        first = place // size * size
        last = min(first + size, count) - 1
        records = f"record {place}" if last <= first else f"records {first} to {last}"
        cause = str(error).split("\n")[0][:200]
        where = f"damaged shard {self._files[file]}, {records}"
        return f"{where}: cannot be read (copy or write it anew): {cause}"

    def where(self, index: int) -> str:
        """File and place of a record."""
        file, place = self._find(index)
        return f"{self._files[file]}[{place}]"


def read_manifest(folder: str) -> dict[str, Any]:
    """What `prepare_data` wrote about a folder of shards.

    Raises:
      ValueError: it is missing, of another version, or something else.
    """
    path = pathlib.Path(folder) / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{path}: no such file; prepare_data writes it last, so run its command again"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ValueError(f"{path}: not a manifest of {FORMAT}")
    if manifest.get("version") != VERSION:
        version = manifest.get("version")
        raise ValueError(f"{path}: version {version}, this code reads {VERSION}")
    shards: Any = manifest.get("shards")
    known = isinstance(shards, list) and all(isinstance(shard, dict) for shard in shards)
    if not known or any({"file", "bytes", "records"} - shard.keys() for shard in shards):
        raise ValueError(f"{path}: does not say which shards there are; run prepare_data again")
    return manifest


def open_shards(folder: str) -> ArrayRecords:
    """The records of a folder that `prepare_data` made.

    Raises:
      ValueError: there is no manifest, or a shard is missing or of another size.
    """
    shards = read_manifest(folder)["shards"]
    files = [pathlib.Path(folder) / shard["file"] for shard in shards]
    for path, shard in zip(files, shards, strict=True):
        if not path.is_file():
            raise ValueError(f"{path}: no such file, but {MANIFEST} names it")
        if path.stat().st_size != shard["bytes"]:
            raise ValueError(
                f"{path}: {path.stat().st_size} bytes, {MANIFEST} says {shard['bytes']}; run "
                "prepare_data again"
            )
    return ArrayRecords([str(path) for path in files], [shard["records"] for shard in shards])
