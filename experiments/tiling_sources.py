"""Image sizes of a CSV file, a folder or a LLaVA dataset; headers are read, pixels never."""

from __future__ import annotations

import collections
import concurrent.futures
import csv
import dataclasses
import functools
import multiprocessing
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tqdm

from bluelm_jax.data.images import DEFAULT_LIMITS, ImageError, read_size, resolve_path
from bluelm_jax.data.sources import FileRecords

EXTENSIONS = (
    ".jpg", ".jpeg", ".png", ".gif", ".webp", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".avif",
    ".jp2",
)  # fmt: skip
_CHUNK = 256
_MAX_GROUPS = 20


@dataclasses.dataclass(frozen=True, eq=False)
class Sizes:
    """Sizes of images and what is known of their origin.

    Attributes:
      widths, heights: int64 [N], pixels, upright.
      num_images: int64 [N], images in the sample that each belongs to.
      groups: int64 [N], index into `group_names`.
      group_names: parts of the dataset that are reported separately.
      unreadable: (name, reason) of the files without a usable size.
    """

    widths: np.ndarray
    heights: np.ndarray
    num_images: np.ndarray
    groups: np.ndarray
    group_names: tuple[str, ...] = ("all",)
    unreadable: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return len(self.widths)


def from_csv(path: str) -> Sizes:
    """Reads columns `width` and `height`; groups by a column `source` up to its first colon.

    Raises:
      ValueError: a column is missing, or a size is not a positive integer; names the line.
    """
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        if "width" not in header or "height" not in header:
            raise ValueError(f"{path}: the first line must name columns width and height: {header}")
        width_at, height_at = header.index("width"), header.index("height")
        source_at = header.index("source") if "source" in header else None
        rows = [row for row in reader if row]
    try:
        sizes = np.array([(int(row[width_at]), int(row[height_at])) for row in rows], np.int64)
        sources = None if source_at is None else [row[source_at].split(":")[0] for row in rows]
    except (ValueError, IndexError, OverflowError):
        raise ValueError(_first_bad_row(path, rows, header)) from None
    sizes = sizes.reshape(-1, 2)
    if np.any(sizes < 1):
        raise ValueError(_first_bad_row(path, rows, header))
    return _grouped(sizes, np.ones(len(sizes), np.int64), sources)


def _first_bad_row(path: str, rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    columns = header.index("width"), header.index("height")
    for number, row in enumerate(rows):
        values = [row[column].strip() for column in columns if column < len(row)]
        whole = len(row) == len(header) and all(value.isdigit() for value in values)
        if not whole or not all(0 < int(value) < 2**31 for value in values):
            return f"{path}: data row {number + 1}: {row}: needs positive integers below 2**31"
    return f"{path}: needs positive integers below 2**31"


def from_folder(folder: str, workers: int, recurse: bool = True) -> Sizes:
    """Sizes of the image files under a folder, told by extension; groups by first subfolder."""
    if not os.path.isdir(folder):
        raise ValueError(f"{folder}: not a folder")
    names = sorted(_image_files(folder))
    measured = measure(folder, names, workers)
    return _collect(names, [1] * len(names), measured)


def _image_files(folder: str) -> Iterator[str]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        for file in files:
            if file.lower().endswith(EXTENSIONS):
                yield os.path.relpath(os.path.join(parent, file), folder)


def from_llava(data_json: str, image_root: str, workers: int) -> Sizes:
    """Sizes of every image of every sample, so that an image used twice counts twice.

    Text-only samples count nothing. Groups by the first folder in the image's path.
    """
    records = FileRecords(data_json)
    names, num_images = [], []
    for index in tqdm.trange(len(records), desc="records", unit="", leave=False):
        images = records[index].get("image") or []
        images = [images] if isinstance(images, str) else list(images)
        names.extend(images)
        num_images.extend([len(images)] * len(images))
    measured = measure(image_root, list(dict.fromkeys(names)), workers)
    return _collect(names, num_images, measured)


def measure(root: str, names: Sequence[str], workers: int) -> dict[str, tuple[int, int] | str]:
    """Size of each file under `root`, or the reason why there is none."""
    chunks = [names[start : start + _CHUNK] for start in range(0, len(names), _CHUNK)]
    read = functools.partial(_measure_chunk, root)
    results: dict[str, tuple[int, int] | str] = {}
    with tqdm.tqdm(total=len(names), desc="headers", unit=" files", leave=False) as bar:
        for chunk, sizes in zip(chunks, _map(read, chunks, workers), strict=True):
            results.update(zip(chunk, sizes, strict=True))
            bar.update(len(chunk))
    return results


def _map(function, chunks: Sequence, workers: int) -> Iterable:
    if workers <= 1 or len(chunks) <= 1:
        yield from map(function, chunks)
        return
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        yield from pool.map(function, chunks)


def _measure_chunk(root: str, names: Sequence[str]) -> list[tuple[int, int] | str]:
    sizes: list[tuple[int, int] | str] = []
    for name in names:
        try:
            sizes.append(read_size(resolve_path(root, name), DEFAULT_LIMITS))
        except ImageError as error:
            sizes.append(error.reason)
    return sizes


def _collect(
    names: Sequence[str],
    num_images: Sequence[int],
    measured: dict[str, tuple[int, int] | str],
) -> Sizes:
    unreadable = tuple((n, reason) for n, reason in measured.items() if isinstance(reason, str))
    kept = [i for i, name in enumerate(names) if not isinstance(measured[name], str)]
    sizes = np.array([measured[names[i]] for i in kept], np.int64).reshape(-1, 2)
    counts = np.array([num_images[i] for i in kept], np.int64)
    folders = [names[i].split("/")[0] if "/" in names[i] else "" for i in kept]
    return dataclasses.replace(_grouped(sizes, counts, folders), unreadable=unreadable)


def _grouped(sizes: np.ndarray, num_images: np.ndarray, groups: Sequence[str] | None) -> Sizes:
    """Keeps the groups unless there is only one or they are too many to read."""
    widths, heights = np.ascontiguousarray(sizes[:, 0]), np.ascontiguousarray(sizes[:, 1])
    names = collections.Counter(groups or ())
    if groups is None or not 2 <= len(names) <= _MAX_GROUPS:
        name = next(iter(names)) if len(names) == 1 else ""
        return Sizes(widths, heights, num_images, np.zeros(len(sizes), np.int64), (name or "all",))
    order = {name: index for index, name in enumerate(names)}
    indices = np.fromiter(map(order.__getitem__, groups), np.int64, len(sizes))
    labels = tuple(name or "(top folder)" for name in names)
    return Sizes(widths, heights, num_images, indices, labels)
