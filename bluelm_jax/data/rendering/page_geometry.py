"""Sizes and arrangements of the reading task's pages: real image sizes, cells, buckets."""

import csv
import fractions
import functools
import importlib.resources
import pathlib

import numpy as np

# The tile side of the model whose image sizes are being imitated (paper sec. 3.1).
REFERENCE_TILE = 384
# Candidate canvases reach 3 x 3 tiles in the paper's ablation (table 2).
CANVAS_TILES = 3


def load_image_sizes(path: pathlib.Path | None = None) -> dict[str, np.ndarray]:
    """Reads real image sizes, grouped by source.

    Args:
      path: CSV with the columns width, height, source (`coco_val2017:<id>` or `sroie:<file>`);
        the package's own table by default.

    Returns:
      {"coco_val2017": int [n, 2], "sroie": int [n, 2]}, columns (width, height).

    Raises:
      ValueError: if the file names another source, or lacks one.
    """
    packaged = importlib.resources.files("bluelm_jax") / "data" / "assets" / "image_sizes.csv"
    table = packaged if path is None else path
    groups: dict[str, list[tuple[int, int]]] = {"coco_val2017": [], "sroie": []}
    rows = csv.DictReader(table.read_text(encoding="utf-8").splitlines())
    for line, row in enumerate(rows, start=2):
        source = row["source"].split(":")[0]
        if source not in groups:
            raise ValueError(f"{table}:{line}: source {source!r} not in {sorted(groups)}")
        groups[source].append((int(row["width"]), int(row["height"])))
    for source, sizes in groups.items():
        if not sizes:
            raise ValueError(f"{table}: no size of source {source!r}")
    return {source: np.asarray(sizes) for source, sizes in groups.items()}


def scaled_sizes(sizes: np.ndarray, tile_size: int, max_aspect: float, max_side: int) -> np.ndarray:
    """Returns page sizes: image sizes scaled by S/384, at most `max_side` pixels long.

    Args:
      sizes: int [n, 2], image sizes (width, height).
      tile_size: tile side S.
      max_aspect: sizes whose longest side exceeds this many shortest sides are left out.
      max_side: longest side of a page in pixels; larger pages are shrunk to it.

    Returns:
      int [m, 2], m <= n, sides at least 1.
    """
    sizes = sizes[sizes.max(axis=1) <= max_aspect * sizes.min(axis=1)]
    scale = np.minimum(tile_size / REFERENCE_TILE, max_side / sizes.max(axis=1))
    return np.maximum(1, np.rint(sizes * scale[:, None])).astype(int)


@functools.cache
def arrangement(width: int, height: int, num_digits: int) -> tuple[int, int]:
    """Returns (rows, cols) with rows * cols = num_digits whose cells are nearest to squares.

    12 digits stand 3 x 4 on a landscape page, 4 x 3 on a portrait one, 2 x 6 on a wide and 6 x 2
    on a tall one. Of equally square arrangements the one with more columns is taken.
    """
    pairs = [(n, num_digits // n) for n in range(1, num_digits + 1) if num_digits % n == 0]

    def elongation(pair: tuple[int, int]) -> fractions.Fraction:
        """A cell's longer over its shorter side, exact so that ties are ties."""
        sides = (width * pair[0], height * pair[1])
        return fractions.Fraction(max(sides), min(sides))

    return min(pairs, key=lambda pair: (elongation(pair), pair[0]))


def canvas_scale(width: int, height: int, tile_size: int) -> float:
    """Returns canvas pixels a page pixel: how far a page is shrunk into 3 x 3 tiles, at most 1."""
    return min(1.0, CANVAS_TILES * tile_size / max(width, height))


def bucket(width: int, height: int, tile_size: int) -> str:
    """Names a page's shape and size, e.g. `portrait-large`, to report accuracy by.

    Shape by width / height: tall < 1/2 <= portrait < 4/5 <= square <= 5/4 < landscape <= 2 <
    wide. Size by the longest side in tiles: small <= 2 < medium <= 3 < large; a large page is
    shrunk by every scheme whose canvas ends at 3 x 3 tiles.
    """
    aspect = width / height
    if aspect < 0.5:
        shape = "tall"
    elif aspect < 0.8:
        shape = "portrait"
    elif aspect <= 1.25:
        shape = "square"
    else:
        shape = "landscape" if aspect <= 2.0 else "wide"
    tiles = max(width, height) / tile_size
    return f"{shape}-{'small' if tiles <= 2 else 'medium' if tiles <= CANVAS_TILES else 'large'}"


def max_digit_height(cell_width: int, cell_height: int, aspect: float) -> float:
    """Tallest digit a cell holds with a pixel of room on each side (two for anti-aliasing)."""
    return min(cell_height - 3.0, (cell_width - 3.0) / aspect)
