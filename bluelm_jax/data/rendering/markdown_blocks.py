"""Blocks of a Markdown document on a page: headings, paragraphs, lists, code, quotes, tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from bluelm_jax.data.rendering import markdown_tables, markdown_tree, scripts
from bluelm_jax.data.rendering.markdown_inline import Typesetter
from bluelm_jax.data.rendering.markdown_page import Page, PageStyle
from bluelm_jax.data.rendering.markdown_tree import Run

if TYPE_CHECKING:
    from markdown_it.tree import SyntaxTreeNode

_HEADINGS = (1.7, 1.45, 1.25, 1.1, 1.0, 1.0)


def layout(nodes: Sequence[SyntaxTreeNode], setter: Typesetter, style: PageStyle) -> Page:
    """Lays out top-level blocks."""
    page = Page(style)
    page.bottom = _blocks(page, nodes, setter, 0.0, 0.0)
    return page


def _blocks(
    page: Page, nodes: Sequence[SyntaxTreeNode], setter: Typesetter, x: float, y: float
) -> float:
    """Lays out blocks below y; returns where the last one ends."""
    gap = setter.size * 0.6
    for number, node in enumerate(nodes):
        y += gap if number else 0.0
        y = _block(page, node, setter, x, y)
    return y


def _block(page: Page, node: SyntaxTreeNode, setter: Typesetter, x: float, y: float) -> float:
    match node.type:
        case "heading":
            large = setter.scaled(_HEADINGS[int(node.tag[1]) - 1])
            runs = [dataclasses.replace(run, bold=True) for run in markdown_tree.runs(node)]
            return _lines(page, runs, large, x, y)
        case "paragraph":
            return _lines(page, markdown_tree.runs(node), setter, x, y)
        case "bullet_list" | "ordered_list":
            return _list(page, node, setter, x, y)
        case "fence" | "code_block" | "html_block":
            return _code(page, node, setter, x, y)
        case "blockquote":
            bottom = _blocks(page, node.children, setter, x + setter.size, y)
            page.box((x, y, x + max(2, setter.size // 6), bottom), 0.35)
            return bottom
        case "table":
            return markdown_tables.place(page, node, setter, x, y)
        case "hr":
            page.box((x, y + 2, page.limit, y + 4), 0.4)
            return y + 6
    raise ValueError(f"Markdown block {node.type!r} is not known")


def _lines(page: Page, runs: Sequence[Run], setter: Typesetter, x: float, y: float) -> float:
    room = page.limit - x
    for line in setter.lines(runs, room):
        page.text(line, x + max(0.0, room - line.width) * _is_rtl(runs), y + line.ascent)
        y += max((line.ascent + line.descent) * page.style.spacing, line.ascent + line.descent + 1)
    return y


def _is_rtl(runs: Sequence[Run]) -> bool:
    return scripts.direction("".join(run.text for run in runs if not run.math)) == "rtl"


def _list(page: Page, node: SyntaxTreeNode, setter: Typesetter, x: float, y: float) -> float:
    first = int(node.attrs.get("start", 1))
    indent = setter.size * (1.2 if node.type == "bullet_list" else 1.7)
    for number, item in enumerate(node.children, start=first):
        mark = page.style.bullet if node.type == "bullet_list" else f"{number}."
        (line,) = setter.lines([Run(mark)], float("inf"))
        opening = item.children[0] if item.children else None
        rtl = _is_rtl(markdown_tree.runs(opening)) if opening is not None else False
        inner, right = (x, page.limit) if rtl else (x + indent, page.limit)
        page.limit -= indent * rtl
        baseline = y + _first_ascent(item, setter, page.limit - inner)
        page.text(line, right - line.width if rtl else x, baseline)
        # An item without content takes a line all the same.
        bottom = _blocks(page, item.children, setter, inner, y)
        y = bottom if item.children else y + sum(setter.metrics())
        page.limit = right
    return y


def _first_ascent(item: SyntaxTreeNode, setter: Typesetter, room: float) -> float:
    """Ascent of an item's first line, so that its mark stands on the same baseline."""
    first = item.children[0] if item.children else None
    if first is None or first.type != "paragraph":
        return setter.metrics()[0]
    lines = setter.lines(markdown_tree.runs(first), room)
    return lines[0].ascent if lines else setter.metrics()[0]


def _code(page: Page, node: SyntaxTreeNode, setter: Typesetter, x: float, y: float) -> float:
    """Preformatted lines, not broken, on a shaded box. Spaces at a line's start are an indent."""
    pad, top = setter.size * 0.5, y
    small = setter.scaled(0.9)
    indent = small.piece("0", Run("", code=True)).advance
    place = len(page.boxes)
    y += pad
    right = page.limit
    for text in scripts.clean(node.content).rstrip("\n").split("\n"):
        bare = text.lstrip(" ")
        lines = small.lines([Run(bare, code=True)], float("inf")) if bare else []
        for line in lines:
            left = x + pad + indent * (len(text) - len(bare))
            page.text(line, left, y + line.ascent)
            right = max(right, left + line.width + pad)
        y += sum(small.metrics()) * 1.15
    page.box((x, top, right, y + pad), 0.08)
    page.boxes.insert(place, page.boxes.pop())
    return float(np.ceil(y + pad))
