"""The numbers behind `tiling_stats`: what schemes do to a set of sizes, and how they compare."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from bluelm_jax import layout_vectorized
from bluelm_jax.aspect_ratio_vectorized import choose_grids
from bluelm_jax.layout import view_side
from bluelm_jax.schemes import Layout, Tiling
from experiments.tiling_sources import Sizes


def summarise(
    sizes: Sizes, tilings: dict[str, Tiling], layout: Layout, patch_size: int, downsample: int
) -> dict[str, Any]:
    """All statistics, as plain numbers for JSON: of each group, and of all images together."""
    grids = {name: _grids(sizes, tiling) for name, tiling in tilings.items()}
    groups = {"all": np.ones(len(sizes), bool)}
    if len(sizes.group_names) > 1:
        for index, name in enumerate(sizes.group_names):
            groups[name] = sizes.groups == index
    report: dict[str, Any] = {
        "layout": type(layout).__name__,
        "images": len(sizes),
        "unreadable": [{"file": name, "reason": why} for name, why in sizes.unreadable],
        "groups": {},
    }
    measures = {
        name: _measures(sizes, grids[name], tiling, layout, patch_size, downsample)
        for name, tiling in tilings.items()
    }
    for group, mask in groups.items():
        report["groups"][group] = {
            "images": int(mask.sum()),
            "schemes": {
                name: _describe(grids[name][mask], {k: v[mask] for k, v in values.items()})
                for name, values in measures.items()
            },
            "pairs": [
                _compare(a, b, measures[a]["canvas"][mask], measures[b]["canvas"][mask])
                for a, b in itertools.combinations(tilings, 2)
            ],
        }
    return report


def _grids(sizes: Sizes, tiling: Tiling) -> np.ndarray:
    grids = np.ones((len(sizes), 2), np.int64)
    for count in np.unique(sizes.num_images).tolist():
        where = sizes.num_images == count
        grids[where] = choose_grids(sizes.widths[where], sizes.heights[where], tiling, count)
    return grids


def _measures(
    sizes: Sizes,
    grids: np.ndarray,
    tiling: Tiling,
    layout: Layout,
    patch_size: int,
    downsample: int,
) -> dict[str, np.ndarray]:
    """Views, tokens, canvas pixels, canvas pixels an image pixel, share of canvas unused; [N]."""
    widths, heights = sizes.widths, sizes.heights
    side = view_side(tiling.tile_size, patch_size, downsample)
    canvas = grids.prod(axis=1) * tiling.tile_size**2
    drawn = layout_vectorized.drawn_sizes(widths, heights, grids, tiling).prod(axis=1)
    return {
        "views": layout_vectorized.count_views(grids, tiling),
        "tokens": layout_vectorized.count_tokens(widths, heights, grids, tiling, layout, side),
        "canvas": canvas,
        "enlargement": canvas / (widths * heights),
        "padding": 1 - drawn / canvas,
    }


def _describe(grids: np.ndarray, measures: dict[str, np.ndarray]) -> dict[str, Any]:
    pairs, counts = np.unique(grids, axis=0, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    histogram = {f"{pairs[i, 0]}x{pairs[i, 1]}": int(counts[i]) for i in order}
    described: dict[str, Any] = {"grids": histogram}
    for name in ("views", "tokens", "enlargement", "padding"):
        values = measures[name]
        if not len(values):
            described[name] = None
            continue
        p50, p95 = np.percentile(values, (50, 95))
        described[name] = {
            "mean": float(values.mean()),
            "p50": float(p50),
            "p95": float(p95),
            "max": float(values.max()),
        }
    return described


def _compare(a: str, b: str, canvas_a: np.ndarray, canvas_b: np.ndarray) -> dict[str, Any]:
    return {
        "scheme": a,
        "against": b,
        "smaller": int((canvas_a < canvas_b).sum()),
        "equal": int((canvas_a == canvas_b).sum()),
        "larger": int((canvas_a > canvas_b).sum()),
    }


def format_table(report: dict[str, Any]) -> str:
    """The report as text."""
    lines = []
    for group, stats in report["groups"].items():
        lines.append(f"{group}: {stats['images']:,} images")
        lines.append(
            f"  {'scheme':24}{'views':^26}{'tokens':^28}{'canvas / image':^18}{'padding':^16}"
        )
        head = f"{'mean':>7}{'p50':>5}{'p95':>6}{'max':>6}  {'mean':>8}{'p50':>6}{'p95':>7}"
        lines.append(f"  {'':24}{head}{'max':>7}{'mean':>8}{'max':>10}{'mean':>9}{'p95':>7}")
        lines += [_scheme_line(name, values) for name, values in stats["schemes"].items()]
        for name, values in stats["schemes"].items():
            grids = [f"{grid} {count:,}" for grid, count in values["grids"].items()]
            more = f", and {len(grids) - 10} more" if len(grids) > 10 else ""
            lines.append(f"  {name}: grids {', '.join(grids[:10])}{more}")
        for pair in stats["pairs"]:
            lines.append(
                f"  {pair['scheme']} against {pair['against']}: smaller {pair['smaller']:,}, "
                f"equal {pair['equal']:,}, larger {pair['larger']:,}"
            )
        lines.append("")
    if report["unreadable"]:
        lines.append(f"not read: {len(report['unreadable']):,} files")
        lines += [f"  {bad['file']}: {bad['reason']}" for bad in report["unreadable"][:20]]
        if len(report["unreadable"]) > 20:
            lines.append("  ... the rest is in unreadable.csv and stats.json under --out")
    return "\n".join(lines).rstrip() + "\n"


def _scheme_line(name: str, values: dict[str, Any]) -> str:
    if values["views"] is None:
        return f"  {name:24} (no images)"
    v, t, e, p = (values[key] for key in ("views", "tokens", "enlargement", "padding"))
    return (
        f"  {name:24}{v['mean']:7.2f}{v['p50']:5.0f}{v['p95']:6.0f}{v['max']:6.0f}  "
        f"{t['mean']:8.1f}{t['p50']:6.0f}{t['p95']:7.0f}{t['max']:7.0f}"
        f"{e['mean']:8.2f}{e['max']:10.1f}{p['mean']:9.1%}{p['p95']:7.1%}"
    )
