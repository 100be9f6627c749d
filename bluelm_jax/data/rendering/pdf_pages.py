"""PDF pages as images with the text of their text layer, through PDFium."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from bluelm_jax.data.rendering import corpus, looks, scripts
from bluelm_jax.data.rendering.sampling import Drop, Drops, Sample, ask, encode

MISSING = "rendering PDF pages needs pypdfium2: pip install pypdfium2"
# PDFium marks a hyphen that it believes to be a line's, not the text's, with U+FFFE or U+0002.
_LINE_HYPHEN = re.compile("[\ufffe\x02]\r?\n?")
_POINTS_AN_INCH = 72.0
# Lines closer than this, in points, are not cut apart.
_MIN_GAP = 1.5
_ATTEMPTS = 4

Box = tuple[float, float, float, float]  # left, bottom, right, top in points


@dataclasses.dataclass(frozen=True, kw_only=True)
class PdfConfig:
    """How page images vary.

    Attributes:
      dpi: range of the resolution, uniform.
      band_fraction: share of images that show a band of the page, cut between lines.
      min_chars: fewer characters than these are taken for no text layer.
      max_chars: more text than this is too much for an answer; a band of it may do.
      max_side: longest side in pixels; larger pages are drawn at a lower resolution.
      noise: see `looks.sample`.
    """

    dpi: tuple[float, float] = (72.0, 144.0)
    band_fraction: float = 0.5
    min_chars: int = 20
    max_chars: int = 4000
    max_side: int = 1536
    noise: float = 1.0

    def __post_init__(self) -> None:
        if not 10 <= self.dpi[0] <= self.dpi[1] <= 600:
            raise ValueError(f"dpi {self.dpi}: must rise within 10..600")
        if not 0 <= self.band_fraction <= 1 or not 0 <= self.noise <= 1:
            raise ValueError(
                f"band_fraction {self.band_fraction}, noise {self.noise}: must lie in 0..1"
            )
        if not 1 <= self.min_chars <= self.max_chars or self.max_side < 64:
            raise ValueError(
                f"min_chars {self.min_chars} must lie in 1..max_chars {self.max_chars}, "
                f"max_side {self.max_side} at 64 or above"
            )


@functools.cache
def _pdfium() -> Any:
    try:
        import pypdfium2
    except ImportError as error:
        raise ImportError(MISSING) from error
    atexit.register(_open.cache_clear)  # Before PDFium looks for files that were left open.
    return pypdfium2


@functools.lru_cache(maxsize=4)
def _open(path: str) -> Any:
    return _pdfium().PdfDocument(path)


def find_pages(paths: Sequence[str], drops: Drops) -> tuple[tuple[str, int], ...]:
    """Lists the pages of PDF files and of folders of them: (path, page number from 0).

    Args:
      paths: files and folders.
      drops: gains files that are encrypted or damaged.

    Raises:
      ImportError: without pypdfium2.
      ValueError: if no page is left.
    """
    pdfium = _pdfium()
    pages: list[tuple[str, int]] = []
    for path in corpus.input_files(paths, (".pdf",)):
        try:
            with pdfium.PdfDocument(path) as document:
                pages += [(str(path), number) for number in range(len(document))]
        except (pdfium.PdfiumError, OSError) as error:
            locked = "password" in str(error).lower()
            reason = "PDF that needs a password" if locked else "damaged PDF"
            drops.add(reason, f"{path.name}: {error}"[:200])
    if not pages:
        raise ValueError(f"input {list(paths)}: no readable page in it; {drops.summary()}")
    return tuple(pages)


def clean_text(text: str) -> str:
    """Text as it reads: hyphens of line ends taken back, white space tidied, no empty lines."""
    # At the end of a band the word's other half is not there, and the hyphen is what one sees.
    text = re.sub("[\ufffe\x02]\\s*$", "-", text)
    text = scripts.clean(_LINE_HYPHEN.sub("", text))
    lines = (" ".join(line.split()) for line in text.split("\n"))
    return "\n".join(filter(None, lines))


class PdfTask:
    """Draws pages: sample i is page i of an order shuffled by the seed. See `sampling.Task`."""

    kind = "pdf"

    def __init__(
        self,
        pages: tuple[tuple[str, int], ...],
        cfg: PdfConfig,
        *,
        seed: int,
        language: str = "",
        prepared: dict[str, dict[str, Any]] | None = None,
    ):
        self._pages, self._cfg, self._prepared = pages, cfg, prepared or {}
        self._language = language
        # Every page once before any comes again, with another look.
        self._order = np.random.default_rng([seed, 1]).permutation(len(pages))

    def __len__(self) -> int:
        return len(self._pages)

    def settings(self) -> dict[str, Any]:
        """See `sampling.Task`."""
        sha = hashlib.sha256()
        for path in sorted({path for path, _ in self._pages}):
            sha.update(hashlib.sha256(pathlib.Path(path).read_bytes()).digest())
        return {
            **dataclasses.asdict(self._cfg),
            "language": self._language,
            "text": sha.hexdigest()[:16],
        }

    def licences(self) -> dict[str, str]:
        """See `sampling.Task`; a PDF's own fonts are not looked at."""
        return {}

    def prepared(self) -> dict[str, dict[str, Any]]:
        """See `sampling.Task`."""
        return self._prepared

    def sample(self, rng: np.random.Generator, index: int) -> Sample | Drop:
        """See `sampling.Task`."""
        path, number = self._pages[self._order[index % len(self._pages)]]
        name = f"{pathlib.Path(path).name}, page {number + 1}"
        pdfium = _pdfium()
        try:
            page = _open(path)[number]
            try:
                return self._draw(rng, page, name)
            finally:
                page.close()
        except pdfium.PdfiumError as error:
            return Drop("damaged page", f"{name}: {error}"[:200])

    def _draw(self, rng: np.random.Generator, page: Any, name: str) -> Sample | Drop:
        cfg = self._cfg
        words = page.get_textpage()
        try:
            box, text, image, dpi = self._part(rng, page, words)
        finally:
            words.close()
        if len(text) < cfg.min_chars:
            return Drop("no text layer, or hardly any text", name)
        if len(text) > cfg.max_chars:
            return Drop("more text than max_chars", f"{name}: {len(text)} characters")
        # A page has its own colours; what is photographed is the sheet.
        look = dataclasses.replace(
            looks.sample(rng, cfg.noise, text_px=dpi / 6), ink=(0, 0, 0), paper=(255, 255, 255)
        )
        image = looks.finish(image, look)
        data, suffix = encode(image, look.jpeg_quality)
        language = self._language or scripts.language_of(text)
        return Sample(
            image=data,
            suffix=suffix,
            width=image.width,
            height=image.height,
            prompt=ask(rng, corpus.instructions("pdf", language)),
            answer=text,
            meta={
                "language": language,
                "source": name,
                "dpi": round(dpi, 1),
                "part": "page" if box is None else "band",
                **look.meta(),
            },
        )

    def _part(
        self, rng: np.random.Generator, page: Any, words: Any
    ) -> tuple[Box | None, str, Image.Image, float]:
        """(box or None for the page, its text, image, resolution); a band that cuts no ink."""
        much = words.count_chars() > self._cfg.max_chars
        if (rng.random() < self._cfg.band_fraction or much) and page.get_rotation() == 0:
            gaps = _gaps(page, words)
            left, _, right, _ = page.get_bbox()
            for _ in range(_ATTEMPTS if len(gaps) > 2 else 0):
                first, last = sorted(rng.choice(len(gaps), 2, replace=False).tolist())
                box = (left, gaps[first], right, gaps[last])
                text = clean_text(words.get_text_bounded(*box))
                if not self._cfg.min_chars <= len(text) <= self._cfg.max_chars:
                    continue
                image, dpi = self._rasterise(rng, page, box)
                if _plain_edges(image):
                    return box, text, image, dpi
        return None, clean_text(words.get_text_range()), *self._rasterise(rng, page, None)

    def _rasterise(
        self, rng: np.random.Generator, page: Any, box: Box | None
    ) -> tuple[Image.Image, float]:
        width, height = page.get_size()
        crop = (0.0, 0.0, 0.0, 0.0)
        if box is not None:
            left, bottom, right, top = page.get_bbox()
            crop = box[0] - left, box[1] - bottom, right - box[2], top - box[3]
            width, height = box[2] - box[0], box[3] - box[1]
        scale = rng.uniform(*self._cfg.dpi) / _POINTS_AN_INCH
        scale = min(scale, 0.95 * self._cfg.max_side / max(width, height))
        drawn = page.render(scale=scale, crop=crop)
        return drawn.to_pil().convert("RGB"), scale * _POINTS_AN_INCH


def _gaps(page: Any, words: Any) -> list[float]:
    """Heights, in points, at which no text stands: the page's two edges and between lines."""
    _, bottom, _, top = page.get_bbox()
    rects = [words.get_rect(i) for i in range(words.count_rects())]
    found, reach = [bottom], None
    for low, high in sorted((low, high) for _, low, _, high in rects):
        if reach is not None and low > reach + _MIN_GAP:
            found.append((reach + low) / 2)
        reach = high if reach is None else max(reach, high)
    return [*found, top]


def _plain_edges(image: Image.Image) -> bool:
    """Whether the first and last rows hold paper and shades only, no part of a letter."""
    rows = np.asarray(image.convert("L"))[[0, -1]].astype(int)
    return bool((rows.max(axis=1) - rows.min(axis=1) < 64).all())
