"""Rendered reading task: pages of digits whose answer is the digits, row by row.

A page is a light sheet with a few digits spread over all of it in equal cells. The task is made
so that reading depends on resolution: on a `stage2` page the digits' height is given in *canvas
pixels*, pixels of the page after it is shrunk (never enlarged) into a canvas of 3 x 3 tiles. At
that scale the digits are legible. In the thumbnail of one 56-pixel tile they are 3 to 4 pixels
high on receipts, where many blur into each other, and 5 to 9 on pages of a photograph's size,
where most can still be told apart.

Page sizes come from photographs (COCO val2017) and scanned receipts (SROIE), scaled by tile side
over 384 so that a tile of S pixels meets the same proportions as SigLIP's 384-pixel tile does.

Every image is a function of (seed, kind, split, index): the first n images of a split do not
depend on how many are made, and no two splits share a random stream.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Iterator

import numpy as np
from PIL import Image

from bluelm_jax.data.rendering import fonts, page_geometry
from bluelm_jax.data.rendering.page_config import KINDS as KINDS
from bluelm_jax.data.rendering.page_config import PageConfig as PageConfig
from bluelm_jax.data.rendering.page_config import stage1 as stage1
from bluelm_jax.data.rendering.page_config import stage2 as stage2

SPLITS = ("train", "eval")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Page:
    """One sampled page, before it is drawn.

    Attributes:
      width: page width in pixels.
      height: page height in pixels.
      rows: rows of digits.
      cols: digits a row.
      text: the digits in reading order, `rows * cols` of them.
      face: name of the TrueType face.
      digit_height: height of the digits in page pixels.
      shifts: float [rows * cols, 2], place of each digit in its cell's free room (x, y), 0..1.
      paper: grey level of the sheet.
      ink: grey level of the digits.
      noise: standard deviation of the noise in grey levels.
      noise_at: corner (y, x) of the noise field where this page's noise starts.
    """

    width: int
    height: int
    rows: int
    cols: int
    text: str
    face: str
    digit_height: float
    shifts: np.ndarray
    paper: float
    ink: float
    noise: float
    noise_at: tuple[int, int]

    def cell(self, index: int) -> tuple[int, int, int, int]:
        """Returns a digit's cell (left, top, right, bottom) in page pixels."""
        row, col = divmod(index, self.cols)
        left, right = col * self.width // self.cols, (col + 1) * self.width // self.cols
        top, bottom = row * self.height // self.rows, (row + 1) * self.height // self.rows
        return left, top, right, bottom


@functools.cache
def _widest_aspect() -> float:
    """Widest digits of any face: a cell that holds these holds every face's."""
    return max(fonts.digit_aspect(face) for face in fonts.FACES)


def _tallest(width: int, height: int, rows: int, cols: int) -> float:
    """Tallest digit, in page pixels, that every face fits into the smallest cell."""
    return page_geometry.max_digit_height(width // cols, height // rows, _widest_aspect())


def page_sizes(cfg: PageConfig, path: pathlib.Path | None = None) -> dict[str, np.ndarray]:
    """Returns the usable page sizes: real sizes scaled by S/384, without the unusable ones.

    Left out are aspect ratios beyond `max_aspect` and pages whose cells hold no digit of
    `min_height` canvas pixels.

    Args:
      cfg: the pages' look.
      path: see `page_geometry.load_image_sizes`.

    Returns:
      {source: int [n, 2]}, columns (width, height) in page pixels, sides at least 1.

    Raises:
      ValueError: if a source has no usable size.
    """
    usable = {}
    for source, sizes in page_geometry.load_image_sizes(path).items():
        pages = page_geometry.scaled_sizes(
            sizes, cfg.tile_size, cfg.max_aspect, cfg.max_side_tiles * cfg.tile_size
        )
        kept = [size for size in pages.tolist() if _legible(*size, cfg)]
        if not kept:
            raise ValueError(f"source {source!r}: none of the sizes is usable with {cfg}")
        usable[source] = np.asarray(kept)
    return usable


@functools.cache
def _legible(width: int, height: int, cfg: PageConfig) -> bool:
    rows, cols = _arrangement(width, height, cfg)
    scale = page_geometry.canvas_scale(width, height, cfg.tile_size)
    return _tallest(width, height, rows, cols) * scale >= cfg.min_height


def _arrangement(width: int, height: int, cfg: PageConfig) -> tuple[int, int]:
    return cfg.arrangement or page_geometry.arrangement(width, height, cfg.num_digits)


def _stage1_arrangements(cfg: PageConfig) -> list[tuple[int, int]]:
    """Arrangements whose cells hold a digit of `min_height`: 2 x 4 and 4 x 2 for 8 digits."""
    side, n = cfg.tile_size, cfg.num_digits
    pairs = [(rows, n // rows) for rows in range(1, n + 1) if n % rows == 0]
    pairs = [cfg.arrangement] if cfg.arrangement else pairs
    fitting = [
        (rows, cols) for rows, cols in pairs if _tallest(side, side, rows, cols) >= cfg.min_height
    ]
    if not fitting:
        raise ValueError(
            f"num_digits {n}: no arrangement on a {side}-pixel tile has digits of "
            f"{cfg.min_height} pixels"
        )
    return fitting


def sample_page(
    rng: np.random.Generator, cfg: PageConfig, sizes: dict[str, np.ndarray] | None = None
) -> Page:
    """Draws a page's content and looks.

    Args:
      rng: its random numbers.
      cfg: the pages' look.
      sizes: for stage 2, the result of `page_sizes(cfg)`.

    Raises:
      ValueError: if a stage-2 page is asked for without sizes.
    """
    face = fonts.FACES[rng.integers(cfg.num_faces)]
    if cfg.kind == "stage1":
        width = height = cfg.tile_size
        options = _stage1_arrangements(cfg)
        rows, cols = options[rng.integers(len(options))]
        wanted = rng.uniform(*cfg.stage1_height)
    else:
        if sizes is None:
            raise ValueError("a stage2 page needs sizes=page_sizes(cfg)")
        source = "sroie" if rng.random() < cfg.receipts_fraction else "coco_val2017"
        width, height = sizes[source][rng.integers(len(sizes[source]))].tolist()
        rows, cols = _arrangement(width, height, cfg)
        wanted = rng.uniform(*cfg.stage2_height) / page_geometry.canvas_scale(
            width, height, cfg.tile_size
        )
    room = page_geometry.max_digit_height(width // cols, height // rows, fonts.digit_aspect(face))
    paper = rng.uniform(200.0, 255.0)
    return Page(
        width=width,
        height=height,
        rows=rows,
        cols=cols,
        text="".join(map(str, rng.integers(10, size=cfg.num_digits))),
        face=face,
        digit_height=min(wanted, room),
        shifts=0.5 + cfg.jitter * rng.uniform(-0.5, 0.5, (cfg.num_digits, 2)),
        paper=paper,
        ink=rng.uniform(0.0, paper - 120.0),
        noise=rng.uniform(0.0, cfg.max_noise),
        noise_at=tuple(rng.integers(_NOISE_SIDE, size=2).tolist()),
    )


_NOISE_SIDE = 1024


@functools.cache
def _noise_field() -> np.ndarray:
    """Fixed standard normal noise, repeated once along both axes so that any corner serves."""
    field = np.random.default_rng(0).standard_normal((_NOISE_SIDE, _NOISE_SIDE), dtype=np.float32)
    return np.tile(field, (2, 2))


def _noise(height: int, width: int, corner: tuple[int, int]) -> np.ndarray:
    """A window of the field, which repeats: fresh normals would cost more than the whole page."""
    y, x = corner
    if max(height, width) <= _NOISE_SIDE:
        return _noise_field()[y : y + height, x : x + width]
    rows, cols = (y + np.arange(height)) % _NOISE_SIDE, (x + np.arange(width)) % _NOISE_SIDE
    return _noise_field()[np.ix_(rows, cols)]


def digit_boxes(page: Page) -> list[tuple[int, int, int, int]]:
    """Returns each digit's ink box (left, top, right, bottom) in page pixels, reading order."""
    boxes = []
    for index, digit in enumerate(page.text):
        height, width = fonts.digit_mask(page.face, page.digit_height, digit).shape
        left, top, right, bottom = page.cell(index)
        shift_x, shift_y = page.shifts[index]
        x = left + 1 + round(shift_x * (right - left - 2 - width))
        y = top + 1 + round(shift_y * (bottom - top - 2 - height))
        boxes.append((x, y, x + width, y + height))
    return boxes


def render_page(page: Page) -> Image.Image:
    """Draws a page: ink over paper by coverage, then noise. Returns an image of mode `L`."""
    coverage = np.zeros((page.height, page.width), np.float32)
    for digit, (left, top, right, bottom) in zip(page.text, digit_boxes(page), strict=True):
        mask = fonts.digit_mask(page.face, page.digit_height, digit)
        coverage[top:bottom, left:right] = mask
    grey = page.paper + (page.ink - page.paper) * coverage
    grey += page.noise * _noise(page.height, page.width, page.noise_at)
    return Image.fromarray(np.clip(grey + 0.5, 0, 255).astype(np.uint8))


def page_rng(seed: int, kind: str, split: str, index: int) -> np.random.Generator:
    """Returns the random numbers of one image; see the module's docstring."""
    if kind not in KINDS or split not in SPLITS:
        raise ValueError(f"kind {kind!r}, split {split!r}: must be one of {KINDS}, {SPLITS}")
    return np.random.default_rng([seed, KINDS.index(kind), SPLITS.index(split), index])


def iter_pages(
    cfg: PageConfig,
    *,
    seed: int,
    split: str,
    num_pages: int,
    sizes_path: pathlib.Path | None = None,
) -> Iterator[Page]:
    """Yields the first `num_pages` pages of a split."""
    sizes = page_sizes(cfg, sizes_path) if cfg.kind == "stage2" else None
    for index in range(num_pages):
        look = cfg.at(index) if split == "train" else cfg
        yield sample_page(page_rng(seed, cfg.kind, split, index), look, sizes)


def page_record(page: Page, *, identity: str, image: str, cfg: PageConfig) -> dict:
    """Returns a page's record in LLaVA's format, with width, height and bucket besides."""
    return {
        "id": identity,
        "image": image,
        "conversations": [
            {"from": "human", "value": f"<image>\n{cfg.prompt}"},
            {"from": "gpt", "value": page.text},
        ],
        "width": page.width,
        "height": page.height,
        "bucket": page_geometry.bucket(page.width, page.height, cfg.tile_size),
    }


def write_split(
    out_dir: str | pathlib.Path,
    cfg: PageConfig,
    *,
    seed: int,
    split: str,
    num_pages: int,
    sizes_path: pathlib.Path | None = None,
) -> pathlib.Path:
    """Writes a split: `<kind>_<split>.json` and `<kind>/<split>/<index>.png` under `out_dir`.

    Image paths in the JSON file are relative to `out_dir`. Existing files are overwritten.

    Returns:
      Path of the JSON file.
    """
    out_dir = pathlib.Path(out_dir)
    folder = pathlib.PurePosixPath(cfg.kind, split)
    (out_dir / folder).mkdir(parents=True, exist_ok=True)
    pages = iter_pages(cfg, seed=seed, split=split, num_pages=num_pages, sizes_path=sizes_path)
    records = []
    for index, page in enumerate(pages):
        image = str(folder / f"{index:06d}.png")
        render_page(page).save(out_dir / image, compress_level=1)
        identity = f"{cfg.kind}-{split}-{index:06d}"
        records.append(page_record(page, identity=identity, image=image, cfg=cfg))
    path = out_dir / f"{cfg.kind}_{split}.json"
    path.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    return path
