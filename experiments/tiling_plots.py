"""Plots of a tiling report: grids, tokens an image and enlargement of each scheme."""

from __future__ import annotations

import pathlib
from typing import Any

import matplotlib
from matplotlib.figure import Figure

# A Figure of its own needs no display and leaves the process's plotting state alone.
_COLOURS = matplotlib.color_sequences["tab10"]
_MOST_GRIDS = 20


def write(folder: pathlib.Path, report: dict[str, Any]) -> list[str]:
    """Writes grids.png and costs.png; returns the names of the files written."""
    stats = report["groups"]["all"]
    if not stats["images"]:
        return []
    _grids(stats["schemes"]).savefig(folder / "grids.png", dpi=120)
    _costs(stats["schemes"], report["layout"]).savefig(folder / "costs.png", dpi=120)
    return ["grids.png", "costs.png"]


def _grids(schemes: dict[str, Any]) -> Figure:
    """Share of images on each grid, the commonest grids of all schemes together."""
    totals: dict[str, int] = {}
    for values in schemes.values():
        for grid, count in values["grids"].items():
            totals[grid] = totals.get(grid, 0) + count
    shown = sorted(sorted(totals, key=lambda grid: -totals[grid])[:_MOST_GRIDS], key=_by_tiles)
    figure = Figure(figsize=(max(7, 0.55 * len(shown) + 2), 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / len(schemes)
    for number, (name, values) in enumerate(schemes.items()):
        images = sum(values["grids"].values())
        shares = [100 * values["grids"].get(grid, 0) / images for grid in shown]
        at = [position - 0.4 + (number + 0.5) * width for position in range(len(shown))]
        axes.bar(at, shares, width, label=name, color=_COLOURS[number % len(_COLOURS)])
    axes.set_xticks(range(len(shown)), shown)
    axes.set_xlabel("grid (columns x rows)")
    axes.set_ylabel("images, %")
    axes.legend(frameon=False)
    return figure


def _by_tiles(grid: str) -> tuple[int, int]:
    cols, rows = map(int, grid.split("x"))
    return cols * rows, cols


def _costs(schemes: dict[str, Any], layout: str) -> Figure:
    """Mean, median and 95th percentile of tokens and of canvas pixels an image pixel."""
    figure = Figure(figsize=(10, 1.6 + 0.5 * len(schemes)), layout="constrained")
    names = list(schemes)
    panels = figure.subplots(1, 3, sharey=True)
    keys = ("tokens", "enlargement", "padding")
    labels = (
        f"tokens an image ({layout})",
        "canvas pixels / image pixels",
        "padding, share of canvas",
    )
    for axes, key, label in zip(panels, keys, labels, strict=True):
        for number, name in enumerate(names):
            values, colour = schemes[name][key], _COLOURS[number % len(_COLOURS)]
            axes.plot([values["p50"], values["p95"]], [number, number], color=colour, lw=5)
            axes.plot(values["mean"], number, "o", color=colour, mec="black", ms=8)
        axes.set_xlabel(label)
        axes.set_xlim(left=0)
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    figure.suptitle("bar: median to 95th percentile; dot: mean", fontsize=9)
    return figure
