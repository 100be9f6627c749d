"""Markdown tables on a page: column widths, alignment, rules."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bluelm_jax.data.rendering import markdown_tree
from bluelm_jax.data.rendering.markdown_inline import TextLine, Typesetter
from bluelm_jax.data.rendering.markdown_page import Page
from bluelm_jax.data.rendering.markdown_tree import Run

if TYPE_CHECKING:
    from markdown_it.tree import SyntaxTreeNode

# All lines; lines between rows; three lines as in books; shaded rows; no lines at all.
STYLES = ("grid", "rows", "book", "zebra", "bare")
_SHADE = 0.55


def place(page: Page, node: SyntaxTreeNode, setter: Typesetter, x: float, y: float) -> float:
    """Lays out a table at (x, y); returns where it ends.

    Columns are as wide as their widest cell, unless the table would be wider than the page: then
    the widest columns give way and their cells break into lines, down to the longest word.
    """
    rows = [row for part in node.children for row in part.children]
    cells = [[_runs(cell) for cell in row.children] for row in rows]
    ways = [str(cell.attrs.get("style", "")).rpartition(":")[2] for cell in rows[0].children]
    pad_x, pad_y = setter.size * 0.5, setter.size * 0.25
    widths = _column_widths(cells, setter, page.limit - x, pad_x)
    edges = x + np.concatenate([[0.0], np.cumsum(widths + 2 * pad_x)])
    tops = [y]
    for row in cells:
        lines = [setter.lines(cell, width) for cell, width in zip(row, widths, strict=True)]
        tops.append(tops[-1] + max(map(_height, lines)) + 2 * pad_y)
        _shade(page, len(tops) - 2, edges, tops)
        for cell, left, width, way in zip(lines, edges + pad_x, widths, ways, strict=False):
            _cell(page, cell, left, width, tops[-2] + pad_y, way)
    _rules(page, edges, tops)
    return tops[-1]


def _runs(cell: SyntaxTreeNode) -> list[Run]:
    """The cell's runs, bold in the header; an empty cell has none."""
    runs = markdown_tree.runs(cell)
    if cell.type == "th":
        runs = [Run(r.text, True, r.italic, r.code, r.strike, r.math, r.newline) for r in runs]
    return runs


def _height(lines: list[TextLine]) -> float:
    return sum(line.ascent + line.descent + 1 for line in lines)


def _column_widths(
    cells: list[list[list[Run]]], setter: Typesetter, room: float, pad: float
) -> np.ndarray:
    def widest(cell: list[Run], limit: float) -> float:
        return max((line.width for line in setter.lines(cell, limit)), default=0.0)

    columns = list(zip(*cells, strict=True))
    natural, least = (
        np.maximum([max(widest(cell, limit) for cell in column) for column in columns], setter.size)
        for limit in (float("inf"), 0.0)
    )
    free = room - 2 * pad * len(natural)
    if natural.sum() <= free:
        return np.ceil(natural) + 1
    # One bound for all columns, as high as the page allows.
    low, high = 0.0, float(natural.max())
    for _ in range(30):
        bound = (low + high) / 2
        total = np.maximum(np.minimum(natural, bound), least).sum()
        low, high = (bound, high) if total <= free else (low, bound)
    return np.floor(np.maximum(np.minimum(natural, low), np.ceil(least)))


def _cell(page: Page, lines: list[TextLine], left: float, width: float, y: float, way: str) -> None:
    share = {"center": 0.5, "right": 1.0}.get(way, 0.0)
    for line in lines:
        page.text(line, left + (width - line.width) * share, y + line.ascent)
        y += line.ascent + line.descent + 1


def _shade(page: Page, row: int, edges: np.ndarray, tops: list[float]) -> None:
    style = page.style.table
    if (style == "zebra" and row % 2 == 1) or (style in ("grid", "rows") and row == 0):
        page.box((edges[0], tops[-2], edges[-1], tops[-1]), 0.08)


def _rules(page: Page, edges: np.ndarray, tops: list[float]) -> None:
    style = page.style.table
    rows = {
        "grid": tops,
        "rows": tops,
        "book": [tops[0], tops[1], tops[-1]],
        "zebra": [tops[1]],
    }.get(style, [])
    for y in rows:
        page.box((edges[0], y, edges[-1] + 1, y + 1), _SHADE)
    for x in edges if style == "grid" else ():
        page.box((x, tops[0], x + 1, tops[-1] + 1), _SHADE)
