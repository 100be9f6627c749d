"""Builds what a command asks for: texts read, fonts found, one task of a kind."""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Sequence
from typing import TypeVar

from bluelm_jax.data.rendering import (
    corpus,
    font_index,
    formulas,
    markdown_images,
    pdf_pages,
    scripts,
    shards,
    text_images,
)
from bluelm_jax.data.rendering.sampling import Drops, Task

_Sized = TypeVar(
    "_Sized",
    text_images.TextConfig,
    formulas.FormulaConfig,
    markdown_images.MarkdownConfig,
)
DEFAULT_COUNT = 1000
# What generated Markdown holds besides the built-in sentences.
_MARKDOWN_CHARS = set(string.printable) | set("•—°×")


def make_task(
    kind: str,
    *,
    seed: int = 0,
    inputs: Sequence[str] = (),
    language: str = "",
    folders: Sequence[str] = (),
    families: str = "",
    sizes: tuple[int, int] | None = None,
    max_side: int = 1536,
    noise: float = 1.0,
) -> Task:
    """Returns the task of a kind.

    Args:
      kind: one of `shards.KINDS`.
      seed: shuffles the pages of PDFs; the samples' own seed goes to `shards.render`.
      inputs: files and folders to take texts from; the package's own where there are none.
      language: of the input; guessed from the script by default.
      folders: of fonts, for text and Markdown; see `font_index.scan`.
      families: see `font_index.scan`.
      sizes: range of the font size in pixels, of the resolution in dpi for PDF; each kind's own by
        default.
      max_side: longest side of an image in pixels.
      noise: see `looks.sample`.

    Raises:
      ValueError: if there is no such kind, nothing to draw, or no font to draw it with.
      ImportError: if the kind needs a package that is not installed.
    """
    drops = Drops()
    if kind == "pdf":
        cfg = pdf_pages.PdfConfig(max_side=max_side, noise=noise)
        cfg = dataclasses.replace(cfg, dpi=(float(sizes[0]), float(sizes[1]))) if sizes else cfg
        return _pdf_task(cfg, inputs, drops, seed, language)
    if kind == "formulas":
        given = formulas.load(tuple(inputs), drops) if inputs else ()
        cfg = _sized(formulas.FormulaConfig(max_side=max_side, noise=noise), sizes)
        return formulas.FormulaTask(cfg, given, drops.to_plain())
    if kind == "markdown":
        cfg = _sized(markdown_images.MarkdownConfig(max_side=max_side, noise=noise), sizes)
        documents = markdown_images.load(inputs, drops, language) if inputs else ()
        return _markdown_task(documents, cfg, drops, folders, families)
    if kind == "text":
        cfg = _sized(text_images.TextConfig(max_side=max_side, noise=noise), sizes)
        passages = corpus.load(inputs, drops, language=language) if inputs else corpus.builtin()
        return _text_task(passages, cfg, drops, folders, families)
    raise ValueError(f"kind {kind!r}: must be one of {shards.KINDS}")


def _pdf_task(
    cfg: pdf_pages.PdfConfig, inputs: Sequence[str], drops: Drops, seed: int, language: str
) -> pdf_pages.PdfTask:
    if not inputs:
        raise ValueError("kind pdf has no texts of its own: give --input=FILE_OR_FOLDER")
    pages = pdf_pages.find_pages(inputs, drops)
    return pdf_pages.PdfTask(pages, cfg, seed=seed, language=language, prepared=drops.to_plain())


def _markdown_task(
    documents: tuple[markdown_images.Document, ...],
    cfg: markdown_images.MarkdownConfig,
    drops: Drops,
    folders: Sequence[str],
    families: str,
) -> markdown_images.MarkdownTask:
    alphabet = _MARKDOWN_CHARS | corpus.alphabet(corpus.builtin())
    alphabet |= {char for document in documents for block in document.blocks for char in block}
    index = font_index.scan(alphabet, folders, families)
    return markdown_images.MarkdownTask(index, cfg, documents, _left_out(index, drops))


def _sized(cfg: _Sized, sizes: tuple[int, int] | None) -> _Sized:
    return cfg if sizes is None else dataclasses.replace(cfg, sizes=sizes)


def _text_task(
    passages: tuple[corpus.Passage, ...],
    cfg: text_images.TextConfig,
    drops: Drops,
    folders: Sequence[str],
    families: str,
) -> text_images.TextTask:
    index = font_index.scan(corpus.alphabet(passages), folders, families)
    shaping = scripts.has_raqm()
    kept = []
    for passage in passages:
        if not shaping and any(map(scripts.needs_shaping, passage.lines)):
            drops.add("needs Raqm layout, which Pillow has not here", passage.name)
        elif not any(index.numbers(line, passage.language) for line in passage.lines):
            drops.add("no installed face covers it", passage.name)
        else:
            kept.append(passage)
    if not kept:
        hint = f" {scripts.RAQM_MISSING}" if not shaping else ""
        raise ValueError(f"none of the texts can be drawn: {drops.summary()}.{hint}")
    return text_images.TextTask(tuple(kept), index, cfg, _left_out(index, drops), shaping)


def _left_out(index: font_index.FontIndex, drops: Drops) -> dict:
    for failed in index.failed:
        drops.add("font that cannot be read", failed)
    return drops.to_plain()


def default_count(task: Task) -> int:
    """Samples where none are asked for: each page once, 1000 of what has no end."""
    return len(task) if isinstance(task, pdf_pages.PdfTask) else DEFAULT_COUNT
