"""Opens whatever a source names, and no more of it than it asks for."""

from __future__ import annotations

import glob
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import grain
import numpy as np

from bluelm_jax.data import hf_datasets
from bluelm_jax.data.array_records import MANIFEST, ArrayRecords, open_shards
from bluelm_jax.data.image_bytes import ImageBytes
from bluelm_jax.data.sources import FileRecords, InvalidRecordError, Records
from bluelm_jax.data_config import SourceConfig

_SHARD = ".array_record"
_LOOKED_AT = 16  # Records of a source that its fingerprint is made of.


class Subset:
    """The first records of others, or some drawn at random.

    Drawn are the first places of a shuffle, which has random access and takes no memory; so a larger
    number keeps what a smaller one had, and the same file and seed give the same records in any
    mixture.

    Args:
      records: all of them.
      count: how many to use.
      seed: of the draw; None uses the first ones.

    Attributes:
      whole: all of them.
    """

    def __init__(self, records: Records, count: int, seed: int | None = None):
        self.whole, self._count, self._drawn = records, count, None
        if seed is not None:
            mixed = int(np.random.SeedSequence([seed, 0, 1]).generate_state(1)[0])
            self._drawn = grain.MapDataset.range(len(records)).shuffle(seed=mixed)

    def _index(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(f"record {index} of {self._count}")
        drawn: Any = index if self._drawn is None else self._drawn[index]
        return int(drawn)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self.whole[self._index(index)]

    def where(self, index: int) -> str:
        """File and place of a record, in the file it comes from."""
        return self.whole.where(self._index(index))


def open_records(source: SourceConfig, seed: int = 0) -> Records:
    """The records of a source, `first` and `random` applied.

    Args:
      source: what to open.
      seed: `DataConfig.seed`, for `SourceConfig.random`.

    Raises:
      ValueError: what `path` names is missing or of no known kind, or holds fewer records than
        `first` or `random` ask for.
    """
    return select(open_all(source), source, seed)


def select(records: Records, source: SourceConfig, seed: int) -> Records:
    """The records that `first` and `random` of a source leave; ValueError if there are too few."""
    field = "first" if source.first is not None else "random"
    count = source.first if source.first is not None else source.random
    if count is None:
        return records
    if count > len(records):
        raise ValueError(f"{source.path}: {field} = {count}, but there are {len(records)} records")
    return Subset(records, count, seed if field == "random" else None)


def fingerprint(records: Records) -> str:
    """Tells records from others of the same number, by a few that are spread evenly over them.

    Hashes id, names of images and conversation. So the same records have the same fingerprint
    wherever their file lies, and whether it is JSON or shards made of it; a change in a record that
    is not looked at goes unseen. Reads at most 16 records.
    """
    last = len(records) - 1
    places = sorted({k * last // (_LOOKED_AT - 1) for k in range(_LOOKED_AT)}) if last >= 0 else []
    digest = hashlib.sha256(str(len(records)).encode())
    for place in places:
        digest.update(_content(records, place))
    return digest.hexdigest()[:16]


def _content(records: Records, index: int) -> bytes:
    """What `fingerprint` looks at of a record."""
    try:
        record = records[index]
    except InvalidRecordError as error:
        return error.kind.encode()
    entry = record.get("image") or []
    names = [
        each.name if isinstance(each, ImageBytes) else each
        for each in (entry if isinstance(entry, list) else [entry])
    ]
    content = (record.get("id"), names, record.get("conversations"))
    return json.dumps(content, sort_keys=True, default=repr).encode()


def open_all(source: SourceConfig) -> Records:
    """Every record of what `source.path` names."""
    path = pathlib.Path(source.path)
    if path.is_dir():
        return _open_folder(path)
    names = matching(source.path)
    kinds = {_kind(name) for name in names}
    if kinds == {_SHARD}:
        return ArrayRecords(names)
    if kinds == {"table"}:
        return _existing(names)
    if len(names) > 1:
        raise ValueError(
            f"{source.path}: {len(names)} files, such as {names[0]}; a pattern may name ArrayRecord, "
            "parquet or arrow files, all of one kind"
        )
    return FileRecords(names[0], source.index_dir)


def matching(path: str) -> list[str]:
    """The names that `path` means: itself, or in order those that it is a pattern of.

    Raises:
      ValueError: it is a pattern of no name.
    """
    if pathlib.Path(path).exists() or not glob.has_magic(path):
        return [path]
    names = sorted(glob.glob(path))
    if not names:
        raise ValueError(f"{path}: no file has such a name")
    return names


def _existing(names: list[str]) -> Records:
    for name in names:
        if not pathlib.Path(name).is_file():
            raise ValueError(f"{name}: no such file")
    return hf_datasets.DatasetRecords(names)


def _kind(name: str) -> str:
    if _SHARD in pathlib.Path(name).name:
        return _SHARD
    return "table" if name.endswith(hf_datasets.TABLES) else ""


def _open_folder(folder: pathlib.Path) -> Records:
    if (folder / MANIFEST).is_file() or any(folder.glob(f"*{_SHARD}*")):
        return open_shards(str(folder))
    if hf_datasets.is_saved(folder):
        return hf_datasets.DatasetRecords([str(folder)])
    names = sorted(str(p) for p in folder.iterdir() if p.suffix in hf_datasets.TABLES)
    if names:
        return hf_datasets.DatasetRecords(names)
    raise ValueError(
        f"{folder}: a folder without {MANIFEST} (of prepare_data), data set of save_to_disk, or "
        "parquet or arrow files"
    )
