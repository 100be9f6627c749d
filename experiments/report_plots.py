"""The report's plots, one function a plot; each returns a Matplotlib figure.

Figures are made without pyplot, so nothing is kept behind and no display is needed.
"""

import pathlib
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from PIL import Image, ImageDraw

from experiments.report_tables import labels
from experiments.results import Example, Results
from experiments.statistics import Interval

# Okabe and Ito's palette: distinguishable with the common colour-vision deficiencies.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
MARKERS = ("o", "s", "D", "^", "v", "P")
RIGHT, WRONG = "#1b7f4d", "#b3261e"
_DPI = 160
_MAX_GRIDS = 14
_STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "axes.labelcolor": "#30343b",
    "xtick.color": "#4a4f58",
    "ytick.color": "#4a4f58",
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "legend.frameon": False,
}


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), dpi=_DPI, layout="constrained", facecolor="white")


def _style(index: int) -> dict[str, Any]:
    return {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}


def _errors(interval: Interval) -> np.ndarray:
    """Returns [2, 1] distances to the bounds in percent, for `errorbar`."""
    below, above = interval["value"] - interval["low"], interval["high"] - interval["value"]
    # A bootstrap interval of a skewed share may miss its estimate by a rounding error.
    return 100 * np.maximum([[below], [above]], 0.0)


def accuracy_against_tokens(results: Results) -> Figure:
    """Exact match (interval bars) over mean image tokens, one point a scheme."""
    figure = _figure(7.6, 3.4)
    axes = figure.add_subplot()
    for index, scheme in enumerate(results["schemes"]):
        x, y = scheme["mean_tokens"], 100 * scheme["exact_match"]["value"]
        bars = _errors(scheme["exact_match"])
        axes.errorbar(
            [x], [y], yerr=bars, capsize=4, markersize=8, linewidth=1.5, linestyle="none",
            label=scheme["label"], **_style(index),
        )  # fmt: skip
    axes.set_xlabel("mean image tokens an image")
    axes.set_ylabel("exact match, %")
    axes.margins(x=0.15, y=0.15)
    axes.grid(True)
    axes.legend()
    return figure


def grids_chosen(results: Results) -> Figure:
    """Share of held-out images by grid, grouped bars; rare grids beyond 14 are summed."""
    schemes = results["schemes"]
    totals: dict[str, int] = {}
    for scheme in schemes:
        for grid, count in scheme["grids"].items():
            totals[grid] = totals.get(grid, 0) + count
    kept = sorted(totals, key=lambda grid: -totals[grid])[:_MAX_GRIDS]
    kept.sort(key=_grid_order)
    names = [*kept, "other"] if len(totals) > len(kept) else kept
    figure = _figure(7.6, 3.2)
    axes = figure.add_subplot()
    width = 0.8 / len(schemes)
    for index, scheme in enumerate(schemes):
        counts = [scheme["grids"].get(grid, 0) for grid in kept]
        if len(names) > len(kept):
            counts.append(sum(scheme["grids"].values()) - sum(counts))
        places = np.arange(len(names)) - 0.4 + width * (index + 0.5)
        shares = 100 * np.asarray(counts) / scheme["num_images"]
        axes.bar(places, shares, width * 0.92, color=_style(index)["color"], label=scheme["label"])
    axes.set_xticks(np.arange(len(names)), [name.replace("x", "×") for name in names])
    axes.set_xlabel("grid, columns × rows")
    axes.set_ylabel("images, %")
    axes.grid(True, axis="y")
    axes.legend()
    return figure


def _grid_order(name: str) -> tuple[int, int]:
    cols, rows = map(int, name.split("x"))
    return cols * rows, cols


def loss_curves(results: Results) -> Figure:
    """Training loss over steps: faint as recorded, strong as a running mean; a line a seed."""
    figure = _figure(7.6, 3.2)
    axes = figure.add_subplot()
    drawn = False
    for index, scheme in enumerate(results["schemes"]):
        for number, run in enumerate(scheme["per_seed"]):
            if not run["loss_curve"]:
                continue
            drawn = True
            curve = np.array(run["loss_curve"], np.float64)  # None becomes NaN: a gap
            steps, losses = curve[:, 0], curve[:, 1]
            color = _style(index)["color"]
            axes.plot(steps, losses, color=color, alpha=0.2, linewidth=0.8)
            label = scheme["label"] if number == 0 else None
            axes.plot(steps, _running_mean(losses), color=color, linewidth=1.6, label=label)
    axes.set_xlabel("training step")
    axes.set_ylabel("loss, nats a token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(True)
    if drawn:
        axes.set_ylim(bottom=0)
        axes.legend()
    return figure


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over about 4 % of the curve before each point; gaps are passed over."""
    window = max(1, len(values) // 25)
    known = np.isfinite(values)
    sums = np.cumsum(np.where(known, values, 0.0))
    counts = np.cumsum(known)
    before = np.maximum(np.arange(len(values)) - window, -1)
    previous_sum = np.where(before >= 0, sums[before], 0.0)
    previous_count = np.where(before >= 0, counts[before], 0)
    number = counts - previous_count
    return np.where(number > 0, (sums - previous_sum) / np.maximum(number, 1), np.nan)


def accuracy_by_bucket(results: Results) -> Figure:
    """Exact match by page shape and size, interval bars; buckets by falling count."""
    schemes = results["schemes"]
    counts: dict[str, int] = {}
    for scheme in schemes:
        counts |= {bucket["bucket"]: bucket["count"] for bucket in scheme["buckets"]}
    names = sorted(counts, key=lambda name: (-counts[name], name))
    figure = _figure(max(7.6, 1.05 * len(names) + 1.5), 3.4)
    axes = figure.add_subplot()
    for index, scheme in enumerate(schemes):
        shift = 0.5 * ((index + 0.5) / len(schemes) - 0.5)
        found = {bucket["bucket"]: bucket["exact_match"] for bucket in scheme["buckets"]}
        present = [(i, found[name]) for i, name in enumerate(names) if name in found]
        axes.errorbar(
            [i + shift for i, _ in present],
            [100 * interval["value"] for _, interval in present],
            yerr=np.concatenate([_errors(interval) for _, interval in present], axis=1),
            capsize=3, markersize=6, linewidth=1.2, linestyle="none",
            label=scheme["label"], **_style(index),
        )  # fmt: skip
    ticks = [f"{name.replace('-', chr(10))}\nn={counts[name]}" for name in names]
    axes.set_xticks(np.arange(len(names)), ticks)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.set_ylim(-3, 103)
    axes.set_ylabel("exact match, %")
    axes.grid(True, axis="y")
    axes.legend(ncols=len(schemes), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def draw_grid(
    image: Image.Image, grid: tuple[int, int], fit: str, longest: int = 320
) -> Image.Image:
    """Draws an image on the canvas of its grid, with the borders of the tiles.

    Args:
      image: the page.
      grid: columns and rows.
      fit: `pad` centres the image and keeps its aspect ratio, `stretch` fills the canvas.
      longest: longest side of the drawing in pixels.

    Returns:
      RGB image; padding is grey.

    Raises:
      ValueError: if `fit` is neither or the grid has no tile.
    """
    cols, rows = grid
    if fit not in ("pad", "stretch") or min(cols, rows) < 1:
        raise ValueError(f"fit {fit!r} must be 'pad' or 'stretch', grid {grid} at least 1 x 1")
    cell = max(8, longest // max(cols, rows))
    width, height = cols * cell, rows * cell
    scale_x, scale_y = width / image.width, height / image.height
    if fit == "pad":
        scale_x = scale_y = min(scale_x, scale_y)
    size = max(1, round(image.width * scale_x)), max(1, round(image.height * scale_y))
    canvas = Image.new("RGB", (width, height), "#9aa1ab")
    drawn = image.convert("RGB").resize(size, Image.Resampling.BICUBIC)
    canvas.paste(drawn, ((width - size[0]) // 2, (height - size[1]) // 2))
    pen = ImageDraw.Draw(canvas)
    for col in range(cols + 1):
        x = min(width - 1, col * cell)
        pen.line([(x, 0), (x, height)], fill="#D55E00", width=2)
    for row in range(rows + 1):
        y = min(height - 1, row * cell)
        pen.line([(0, y), (width, y)], fill="#D55E00", width=2)
    return canvas


def open_example(example: Example, image_root: pathlib.Path) -> Image.Image | None:
    """Opens an example's image, or returns None if the file is not there."""
    path = image_root / example["image"]
    if not path.is_file():
        return None
    with Image.open(path) as image:
        return image.convert("RGB")


def examples(results: Results, image_root: pathlib.Path) -> Figure | None:
    """Held-out images a row, schemes a column: the tiles, and the reading above them.

    Returns None if no example's image is there.
    """
    found = [(e, open_example(e, image_root)) for e in results.get("examples") or []]
    found = [(example, image) for example, image in found if image is not None]
    if not found:
        return None
    label = labels(results)
    fits = {scheme["name"]: scheme["fit"] for scheme in results["schemes"]}
    columns = max(len(example["readings"]) for example, _ in found)
    figure = _figure(2.7 * columns, 2.9 * len(found))
    grid = figure.subplots(len(found), columns, squeeze=False)
    for row, (example, image) in zip(grid, found, strict=True):
        for axes in row:
            axes.set_axis_off()
        for axes, reading in zip(row, example["readings"], strict=False):
            cols, rows = reading["grid"]
            axes.imshow(draw_grid(image, (cols, rows), fits[reading["scheme"]]))
            color = RIGHT if reading["correct"] else WRONG
            title = f"{label[reading['scheme']]}, {cols}×{rows}, {reading['tokens']} tokens"
            # `parse_math` off: a model may well write a dollar sign.
            axes.set_title(title, fontsize=7.5, color="#30343b", pad=16, loc="center")
            text = reading["reading"] or "(empty)"
            axes.text(
                0.5, 1.02, f"{text} {'✓' if reading['correct'] else '✗'}", color=color,
                transform=axes.transAxes, ha="center", va="bottom", fontsize=8,
                family="DejaVu Sans Mono", parse_math=False,
            )  # fmt: skip
        row[0].text(
            -0.06, 0.5, f"truth {example['truth']}", rotation=90, transform=row[0].transAxes,
            ha="right", va="center", fontsize=7.5, family="DejaVu Sans Mono", parse_math=False,
        )  # fmt: skip
    return figure


def save_all(
    results: Results, folder: pathlib.Path, image_root: pathlib.Path
) -> dict[str, pathlib.Path]:
    """Writes every plot as `<name>.png` into `folder`; returns name -> path.

    `examples` is absent if no example's image is there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    with matplotlib.rc_context(_STYLE):
        figures = {
            "accuracy_against_tokens": accuracy_against_tokens(results),
            "accuracy_by_bucket": accuracy_by_bucket(results),
            "grids_chosen": grids_chosen(results),
            "loss_curves": loss_curves(results),
            "examples": examples(results, image_root),
        }
        for name, figure in figures.items():
            if figure is not None:
                paths[name] = folder / f"{name}.png"
                # No software version inside: the same results give the same bytes.
                figure.savefig(paths[name], metadata={"Software": None})
    return paths
