"""Hugging Face data sets on disk as LLaVA records.

Needs the package `datasets`, which reads nothing from a network here: the tables stay in Arrow files,
memory mapped by every process (parquet is converted once, into the package's cache). Images stay
undecoded, other columns unread, and nothing is written beside the data set.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from bluelm_jax.data.image_bytes import ImageBytes

TABLES = (".parquet", ".arrow")
COLUMNS = ("id", "conversations", "image", "images")
_MARKS = ("dataset_info.json", "state.json")


def is_saved(folder: pathlib.Path) -> bool:
    """Whether `save_to_disk` made a folder, of one data set or of its splits."""
    split = all((folder / name).is_file() for name in _MARKS)
    return split or (folder / "dataset_dict.json").is_file()


class DatasetRecords:
    """Rows with `conversations` and perhaps `image` or `images`.

    `conversations` is a list of turns or, as the package stores one, a struct of lists. Images are
    paths, lists of paths, or the package's own feature, as bytes or path. Keys without a value and
    columns other than `COLUMNS` are left out. Pickles as the names.

    Args:
      names: one folder of `save_to_disk`, or parquet and arrow files of one kind.

    Raises:
      ValueError: the package is missing, or the names are something else.
    """

    def __init__(self, names: Sequence[str]):
        self._names: Sequence[str] = [str(name) for name in names]
        self._rows = _known_columns(_load(self._names), self._names[0])

    def __getstate__(self):
        return {"_names": self._names}

    def __setstate__(self, state):
        self.__init__(state["_names"])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = {key: value for key, value in self._row(index).items() if value is not None}
        images = row.pop("images", None)
        if "image" not in row and images is not None:
            row["image"] = images
        if "image" in row:
            row["image"] = _to_files(row["image"], self.where(index))
        if isinstance(row.get("conversations"), Mapping):
            row["conversations"] = _to_turns(row["conversations"])
        return row

    def _row(self, index: int) -> dict[str, Any]:
        row: Any = self._rows[index]  # An Arrow table of one row.
        return row.to_pylist()[0]

    def where(self, index: int) -> str:
        """Name of the data set and row."""
        more = f" and {len(self._names) - 1} more" if len(self._names) > 1 else ""
        return f"{self._names[0]}{more}[{index}]"


def _package():
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"Hugging Face data sets need `pip install -r requirements-data.txt` ({error})"
        ) from error
    return datasets


def _load(names: Sequence[str]):
    """The table that the names mean."""
    datasets = _package()
    first = pathlib.Path(names[0])
    if first.is_dir():
        try:
            loaded = datasets.load_from_disk(str(first))
        except (ValueError, FileNotFoundError, OSError) as error:
            raise ValueError(f"{first}: not a data set: {str(error)[:200]}") from error
        if isinstance(loaded, datasets.DatasetDict):
            splits = ", ".join(str(first / str(split)) for split in loaded)
            raise ValueError(f"{first}: holds several splits; name one of {splits}")
        return loaded
    endings = {os.path.splitext(name)[1] for name in names}
    if len(endings) > 1:
        raise ValueError(f"{first.parent}: files of several kinds, {', '.join(sorted(endings))}")
    try:
        if endings == {".parquet"}:
            return datasets.Dataset.from_parquet(list(names))
        return datasets.concatenate_datasets([datasets.Dataset.from_file(n) for n in names])
    except Exception as error:  # Arrow and the package have an error class for each cause.
        raise ValueError(f"{first}: cannot be read: {str(error)[:200]}") from error


def _known_columns(table, name: str):
    """`table` without other columns, its rows as Arrow stores them: images as bytes and paths.

    A cast to an undecoded feature would write a converted copy into the data set's folder.
    """
    known = [column for column in table.column_names if column in COLUMNS]
    if not known:
        found = ", ".join(table.column_names) or "none"
        raise ValueError(f"{name}: columns {found}; needs 'conversations'")
    return table.select_columns(known).with_format("arrow")


def _to_files(entry: Any, where: str) -> Any:
    """Paths and bytes of an `image` entry; what is neither stays, for the check of records."""
    entries = entry if isinstance(entry, list) else [entry]
    files = [_to_file(each, f"image {i}", where) for i, each in enumerate(entries)]
    return files if isinstance(entry, list) else files[0]


def _to_file(entry: Any, name: str, where: str) -> Any:
    if not isinstance(entry, Mapping) or not {"bytes", "path"} <= entry.keys():
        return entry
    data, path = entry["bytes"], entry["path"]
    return path if data is None else ImageBytes(path or name, data, where)


def _to_turns(columns: Mapping[str, Any]) -> Any:
    """A list of turns from a dict of lists; what is something else stays as it is."""
    if not all(isinstance(values, list) for values in columns.values()):
        return dict(columns)
    lengths = {len(values) for values in columns.values()}
    if len(lengths) != 1:
        return dict(columns)
    return [dict(zip(columns, turn, strict=True)) for turn in zip(*columns.values(), strict=True)]
