"""Markdown tables and pages as images, with their source as the answer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from bluelm_jax.data.rendering import (
    corpus,
    font_index,
    formulas,
    looks,
    markdown_blocks,
    markdown_source,
    markdown_tables,
    markdown_tree,
    scripts,
    text_images,
)
from bluelm_jax.data.rendering.markdown_inline import Faces, Typesetter
from bluelm_jax.data.rendering.markdown_page import PageStyle
from bluelm_jax.data.rendering.sampling import Drop, Drops, Sample, ask, encode

if TYPE_CHECKING:
    from markdown_it.tree import SyntaxTreeNode

_ATTEMPTS = 20
_BULLETS = "•-*"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MarkdownConfig:
    """How Markdown images vary.

    Attributes:
      sizes: range of the font size in pixels, log-uniform.
      widths: range of the text width in font sizes, uniform.
      table_fraction: share of generated images that hold a table alone.
      foreign_fraction: share of those tables that are in another language than English.
      max_chars: most characters of source in one image.
      max_side: longest side in pixels; a page that does not fit gets a smaller font.
      noise: see `looks.sample`.
    """

    sizes: tuple[int, int] = (14, 28)
    widths: tuple[int, int] = (16, 46)
    table_fraction: float = 0.5
    foreign_fraction: float = 0.35
    max_chars: int = 1500
    max_side: int = 1536
    noise: float = 1.0

    def __post_init__(self) -> None:
        if not 6 <= self.sizes[0] <= self.sizes[1] <= 400:
            raise ValueError(f"sizes {self.sizes}: must rise within 6..400 pixels")
        if not 4 <= self.widths[0] <= self.widths[1]:
            raise ValueError(f"widths {self.widths}: must rise and start at 4 or above")
        for name in ("table_fraction", "foreign_fraction", "noise"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name)}: must lie in 0..1")
        if self.max_side < 8 * self.sizes[0] or self.max_chars < 1:
            raise ValueError(
                f"max_side {self.max_side} must be 8 x sizes[0] or more, max_chars "
                f"{self.max_chars} positive"
            )


@dataclasses.dataclass(frozen=True)
class Document:
    """A user's Markdown file, by its top-level blocks."""

    name: str
    language: str
    blocks: tuple[str, ...]


def load(paths: Sequence[str], drops: Drops, language: str = "") -> tuple[Document, ...]:
    """Reads Markdown files, and JSONL whose `text` is Markdown.

    Blocks whose source cannot be read off the page are counted in `drops`.

    Raises:
      ValueError: if there is no block in them.
    """
    found = []
    for path in corpus.input_files(paths, corpus.TEXT_SUFFIXES):
        for name, text, stated in corpus.read_documents(path, drops):
            blocks = []
            for number, block in enumerate(markdown_tree.split_blocks(text.replace("\r\n", "\n"))):
                if any(map(markdown_tree.hides_something, markdown_tree.parse(block))):
                    reason = "block with a link, an image or HTML, which a page does not show"
                    drops.add(reason, f"{name}, block {number}")
                else:
                    blocks.append(block)
            if blocks:
                code = stated or language or scripts.language_of(text)
                found.append(Document(name, code, tuple(blocks)))
    if not found:
        raise ValueError(f"input {list(paths)}: no Markdown in it; {drops.summary()}")
    return tuple(found)


class MarkdownTask:
    """Draws generated or given Markdown. See `sampling.Task`."""

    kind = "markdown"

    def __init__(
        self,
        index: font_index.FontIndex,
        cfg: MarkdownConfig,
        given: tuple[Document, ...] = (),
        prepared: dict[str, dict[str, Any]] | None = None,
    ):
        self._index, self._cfg = index, cfg
        self._given, self._prepared = given, prepared or {}
        # A language is offered if one face covers all that its built-in sentences hold.
        self._languages = [
            passage.language
            for passage in corpus.builtin()
            if passage.language in markdown_source.languages()
            and index.numbers("".join(passage.lines), passage.language)
        ]

    def settings(self) -> dict[str, Any]:
        """See `sampling.Task`."""
        text = json.dumps([dataclasses.astuple(document)[1:] for document in self._given])
        digest = hashlib.sha256(text.encode()).hexdigest()[:16] if self._given else "generated"
        faces = self._index.digest()
        return {**dataclasses.asdict(self._cfg), "text": digest, "faces": faces}

    def licences(self) -> dict[str, str]:
        """See `sampling.Task`."""
        return self._index.licences() | formulas.LICENCES

    def prepared(self) -> dict[str, dict[str, Any]]:
        """See `sampling.Task`."""
        return self._prepared

    def sample(self, rng: np.random.Generator, index: int) -> Sample | Drop:
        """See `sampling.Task`."""
        drop = Drop("no Markdown could be drawn", f"sample {index}")
        for _ in range(_ATTEMPTS):
            name, source, language = self._source(rng)
            drawn = self._draw(rng, name, source, language)
            if isinstance(drawn, Sample):
                return drawn
            drop = drawn
        return drop

    def _source(self, rng: np.random.Generator) -> tuple[str, str, str]:
        """(name, Markdown, language)."""
        cfg = self._cfg
        if self._given:
            document = self._given[rng.integers(len(self._given))]
            first = int(rng.integers(len(document.blocks)))
            taken = [document.blocks[first]]
            for block in document.blocks[first + 1 : first + int(rng.integers(1, 7))]:
                if sum(map(len, taken)) + len(block) > cfg.max_chars:
                    break
                taken.append(block)
            return f"{document.name}, block {first}", "\n\n".join(taken), document.language
        if rng.random() >= cfg.table_fraction:
            return "generated page", markdown_source.document(rng), "en"
        language = "en"
        if self._languages and rng.random() < cfg.foreign_fraction:
            language = self._languages[rng.integers(len(self._languages))]
        return f"generated table ({language})", markdown_source.table(rng, language), language

    def _draw(
        self, rng: np.random.Generator, name: str, source: str, language: str
    ) -> Sample | Drop:
        cfg = self._cfg
        nodes = markdown_tree.parse(source)
        text = "".join(map(markdown_tree.plain_text, nodes))
        math_set = formulas.FONT_SETS[rng.integers(len(formulas.FONT_SETS))]
        faces = self._faces(rng, text + _BULLETS[0] + "0123456789.", nodes, language, math_set)
        if faces is None:
            missing = " ".join(f"U+{ord(c):04X}" for c in self._index.uncovered(text)[:5])
            return Drop("no face covers the characters", f"{name}: {missing or 'in one face'}")
        size = round(math.exp(rng.uniform(*np.log(cfg.sizes))))
        em = rng.uniform(*cfg.widths)
        margin = int(rng.integers(6, 10 + size))
        bullet = _BULLETS[rng.integers(len(_BULLETS))]
        table = markdown_tables.STYLES[rng.integers(len(markdown_tables.STYLES))]
        look = looks.sample(rng, cfg.noise, text_px=size)
        alone = all(node.type == "table" for node in nodes)
        while True:
            style = PageStyle(width=round(em * size), bullet=bullet, table=table)
            try:
                page = markdown_blocks.layout(nodes, Typesetter(faces, size), style)
            except formulas.FormulaError as error:
                return Drop("mathtext cannot draw a formula in it", f"{name}: {error}"[:200])
            # A table alone takes only the room it needs.
            sides = page.right + 2 * margin, page.bottom + 2 * margin
            if max(sides) <= 0.95 * cfg.max_side:
                break
            if size <= cfg.sizes[0]:
                return Drop("larger than max_side at the smallest size", name)
            size = max(cfg.sizes[0], min(size - 1, int(size * 0.95 * cfg.max_side / max(sides))))
        image = looks.finish(page.draw(look, margin), look)
        data, suffix = encode(image, look.jpeg_quality)
        questions = corpus.instructions("table" if alone else "markdown", language)
        fonts = [*faces.names(), *([f"mathtext {math_set}"] if "$" in source else [])]
        return Sample(
            image=data,
            suffix=suffix,
            width=image.width,
            height=image.height,
            prompt=ask(rng, questions),
            answer=source,
            meta={"language": language, "fonts": fonts, "size_px": size, **look.meta()},
        )

    def _faces(
        self,
        rng: np.random.Generator,
        text: str,
        nodes: Sequence[SyntaxTreeNode],
        language: str,
        math_set: str,
    ) -> Faces | None:
        """Draws a family that covers `text`, of those with most of the styles it needs."""
        numbers = self._index.numbers(text, language)
        families: dict[str, list[font_index.Face]] = {}
        for face in map(self._index.faces.__getitem__, numbers):
            families.setdefault(face.family, []).append(face)
        # Code has to look unlike text.
        families = {k: v for k, v in families.items() if not v[0].mono} or families
        if not families:
            return None
        needed = {(False, False)} | {(True, False) for node in nodes if node.type == "heading"}
        for node in nodes:
            for inner in node.walk():
                needed |= {(True, False)} if inner.type == "th" else set()
                if inner.type == "inline":
                    needed |= {(run.bold, run.italic) for run in markdown_tree.runs(inner)}
        has = {
            name: len(needed & {(face.bold, face.slanted) for face in members})
            for name, members in families.items()
        }
        names = sorted(name for name in families if has[name] == max(has.values()))
        members = families[names[rng.integers(len(names))]]
        mono = [n for n in numbers if self._index.faces[n].mono and not self._index.faces[n].bold]
        mono = [n for n in mono if not self._index.faces[n].slanted]
        chosen = text_images.choose_face(rng, self._index, tuple(mono)) if mono else None
        return Faces(members, None if chosen is None else self._index.faces[chosen], math_set)
