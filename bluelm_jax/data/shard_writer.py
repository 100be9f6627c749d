"""Writes records as ArrayRecord shards, one at a time, so that an interrupted job loses no more.

Shard k of n holds the records of [k * count // n, (k + 1) * count // n), in their order, without
those that a policy leaves out. It depends on the input and the job alone. A shard appears under its
name when it is whole, and a note with its size and checksum beside the others' in `.progress`; the
manifest, written last, takes the notes in.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from bluelm_jax.data import array_records, conversation, images
from bluelm_jax.data.counters import Counters
from bluelm_jax.data.image_bytes import ImageBytes, image_name
from bluelm_jax.data.opening import matching
from bluelm_jax.data.plans import UnreadableImageError, check_images
from bluelm_jax.data.sources import InvalidRecordError, Records, image_files, sample_name
from bluelm_jax.data_config import SourceConfig

PROGRESS = ".progress"
_BLOCK = 2**20
_SAMPLED = 1000  # Records whose sizes stand for all.
# A record with images is read alone; of text alone, 16 share an index entry and compress together.
_WRITER_OPTIONS = {True: "group_size:1,uncompressed", False: "group_size:16"}

Policy = Literal["raise", "skip"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """What to write.

    Attributes:
      source: where the records and images come from.
      out: folder of the shards.
      name: start of their names.
      shards: how many.
      embed_images: put the images' bytes into the records.
      on_invalid_record: 'raise' or 'skip', for records that break a rule.
      on_unreadable_image: 'raise' or 'skip' the sample, for images to embed whose header is bad.
      max_names: how many names of left-out samples each shard keeps for each reason.
    """

    source: SourceConfig
    out: str
    name: str
    shards: int
    embed_images: bool = False
    on_invalid_record: Policy = "raise"
    on_unreadable_image: Policy = "raise"
    max_names: int = 20

    def file(self, shard: int) -> str:
        """Name of a shard."""
        return f"{self.name}-{shard:05d}-of-{self.shards:05d}.array_record"

    def note(self, shard: int) -> pathlib.Path:
        """Where a finished shard's size and checksum are noted."""
        return pathlib.Path(self.out) / PROGRESS / f"{self.file(shard)}.json"


class Stopped(Exception):
    """The job was told to stop before a shard was whole."""


class ShardWriter:
    """Writes the shards of a job.

    Args:
      job: the job.
      records: all records of its source.
    """

    def __init__(self, job: Job, records: Records):
        self._job, self._records = job, records

    def span(self, shard: int) -> range:
        """The records of a shard."""
        count, shards = len(self._records), self._job.shards
        return range(shard * count // shards, (shard + 1) * count // shards)

    def write(
        self, shard: int, on_record: Callable[[], None], should_stop: Callable[[], bool]
    ) -> dict[str, Any]:
        """Writes a shard and its note.

        Args:
          shard: which.
          on_record: called for every record.
          should_stop: asked before every record.

        Returns:
          The note: file, records, bytes, sha256, counts and names of what was left out.

        Raises:
          InvalidRecordError, UnreadableImageError: unless the policy skips those.
          OSError: the shard cannot be written.
          Stopped: `should_stop` said so.
        """
        path = pathlib.Path(self._job.out) / self._job.file(shard)
        partial = partial_of(path)
        counters = Counters(self._job.max_names)
        encoded = self._encoded(shard, counters, on_record, should_stop)
        try:
            written = _write_file(partial, encoded, _WRITER_OPTIONS[self._job.embed_images])
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        note = {
            "file": path.name,
            "records": written,
            "bytes": partial.stat().st_size,
            "sha256": sha256(partial),
            "skipped": counters.counts,
            "names": counters.names,
        }
        partial.replace(path)
        write_json(self._job.note(shard), note)
        return note

    def _encoded(
        self, shard: int, counters: Counters, on_record, should_stop: Callable[[], bool]
    ) -> Iterator[bytes]:
        policies = {
            "invalid_record": self._job.on_invalid_record,
            "unreadable_image": self._job.on_unreadable_image,
        }
        for index in self.span(shard):
            if should_stop():
                raise Stopped
            try:
                yield self.encode(index)
            except (InvalidRecordError, UnreadableImageError) as error:
                bad_image = isinstance(error, UnreadableImageError)
                reason = "unreadable_image" if bad_image else "invalid_record"
                if policies[reason] == "raise":
                    raise
                counters.add(reason, str(error))
            on_record()

    def encode(self, index: int) -> bytes:
        """A record as it stands in a shard."""
        where = self._records.where(index)
        record = self._records[index]
        name = sample_name(record, where)
        turns, _ = conversation.read_turns(record, name)
        files = check_images(record, turns, name)
        data: list[bytes] = []
        if self._job.embed_images:
            data = [self._read(file, name) for file in files]
            names = [file.name if isinstance(file, ImageBytes) else file for file in files]
            record = {**record, "image": names} if names else record
        elif any(isinstance(file, ImageBytes) for file in files):
            raise ValueError(f"{name}: holds the bytes of its images; embed the images")
        try:
            return array_records.encode(record, data)
        except InvalidRecordError as error:
            raise InvalidRecordError(f"{name}: {error}", error.kind) from error

    def _read(self, file: str | ImageBytes, name: str) -> bytes:
        """Bytes of an image file whose header is good."""
        try:
            if isinstance(file, ImageBytes):
                images.read_size(file)
                return file.data
            path = images.resolve_path(self._job.source.folder, file)
            images.read_size(path)
            return pathlib.Path(path).read_bytes()
        except images.ImageError as error:
            raise UnreadableImageError(f"{name}: {error}") from error
        except OSError as error:
            message = f"{name}: {image_name(file)}: cannot be read: {error}"
            raise UnreadableImageError(message) from error


def _write_file(path: pathlib.Path, encoded: Iterator[bytes], options: str) -> int:
    """Writes an ArrayRecord file; returns how many records it holds."""
    module, written = array_records.array_record_module(), 0
    first = list(itertools.islice(encoded, 1))  # What is wrong with the input comes before a file.
    try:
        writer = module.ArrayRecordWriter(str(path), options)
    except RuntimeError as error:
        raise OSError(f"{path}: cannot be written: {error}") from error
    try:
        for data in itertools.chain(first, encoded):
            writer.write(data)
            written += 1
    finally:
        try:
            writer.close()
        except RuntimeError as error:
            raise OSError(f"{path}: cannot be written: {error}") from error
    return written


def finished(job: Job, shard: int) -> dict[str, Any] | None:
    """The note of a shard that is there, whole and unchanged; None for any other."""
    note, path = job.note(shard), pathlib.Path(job.out) / job.file(shard)
    if not (note.is_file() and path.is_file()):
        return None
    try:
        noted = json.loads(note.read_text(encoding="utf-8"))
        unchanged = path.stat().st_size == noted["bytes"] and sha256(path) == noted["sha256"]
    except (ValueError, KeyError, TypeError):  # A damaged note is none.
        return None
    return noted if unchanged else None


def shards_of(source: SourceConfig, records: Records, megabytes: float, embed_images: bool) -> int:
    """How many shards make each about so large, before compression.

    Sizes are those of up to 1,000 records spread over the input, and of their images' files.
    """
    count = len(records)
    chosen = sorted({i * count // _SAMPLED for i in range(_SAMPLED)} if count else ())
    sizes = [_size(source, records, i, embed_images) for i in chosen]
    total = sum(sizes) / max(1, len(sizes)) * count
    return min(max(1, math.ceil(total / (megabytes * 2**20))), max(1, count))


def _size(source: SourceConfig, records: Records, index: int, embed_images: bool) -> int:
    try:
        record = records[index]
        files = image_files(record, "")
    except InvalidRecordError:
        return 0
    text = len(json.dumps({**record, "image": None}, ensure_ascii=False, default=str))
    if not embed_images:
        return text
    return text + sum(_image_size(source, file) for file in files)


def _image_size(source: SourceConfig, file: str | ImageBytes) -> int:
    if isinstance(file, ImageBytes):
        return len(file.data)
    try:
        return os.stat(images.resolve_path(source.folder, file)).st_size
    except (OSError, ValueError):  # Such as an ImageError; a policy deals with it later.
        return 0


def sha256(path: str | pathlib.Path) -> str:
    """Checksum of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(path: str) -> dict[str, Any]:
    """Path, bytes and checksum of a file, or of the names and contents of several.

    Those are the files of a folder, or what a pattern names.

    Raises:
      ValueError: there is no file.
    """
    root = pathlib.Path(path)
    if root.is_file():
        return {"path": path, "bytes": root.stat().st_size, "sha256": sha256(root)}
    found = root.rglob("*") if root.is_dir() else map(pathlib.Path, matching(path))
    files = sorted(p for p in found if p.is_file())
    if not files:
        raise ValueError(f"{path}: no file to take a checksum of")
    root = root if root.is_dir() else pathlib.Path(os.path.commonpath([p.parent for p in files]))
    total, digest = 0, hashlib.sha256()
    for file in files:
        total += file.stat().st_size
        digest.update(f"{file.relative_to(root).as_posix()} {sha256(file)}\n".encode())
    return {"path": path, "bytes": total, "sha256": digest.hexdigest()}


def partial_of(path: pathlib.Path) -> pathlib.Path:
    """Where this process writes what becomes `path`: no two processes write one file."""
    return path.with_name(f"{path.name}.{os.getpid()}.partial")


def write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    """Writes beside `path` and moves it there, so that nobody reads half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(path)
    partial.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)
