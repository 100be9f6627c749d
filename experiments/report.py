"""Makes the report of a comparison of tiling schemes from its results.

    python -m experiments.report --results=runs/quickstart/results.json --out=runs/quickstart

writes `report.html` (one file, images inside), `report.md`, `results.json` and `plots/*.png`, and
prints the main tables. `write_report` does the same for a results dict in memory.
"""

import base64
import difflib
import io
import pathlib
import re
from typing import Any

import jinja2
import markupsafe
from absl import app, flags, logging
from PIL import Image

from experiments import report_plots, report_tables
from experiments import results as results_lib
from experiments.report_tables import table_text
from experiments.results import Comparison, Example, Results
from gin_configs.errors import guarded

__all__ = ["table_text", "write_report"]

_TEMPLATES = pathlib.Path(__file__).parent / "templates"
_PLOT_TITLES = {
    "accuracy_against_tokens": "Exact match against image tokens",
    "accuracy_by_bucket": "Exact match by page shape and size",
    "grids_chosen": "Grids chosen on the held-out images",
    "loss_curves": "Training loss",
    "examples": "Held-out pages with the tiles that each scheme cuts",
}


def findings(results: Results) -> list[str]:
    """Returns what the numbers say, a sentence each, and no more than they say."""
    schemes = results["schemes"]
    label = report_tables.labels(results)
    best = max(schemes, key=lambda scheme: scheme["exact_match"]["value"])
    ties = [
        s["label"] for s in schemes if s["exact_match"]["value"] == best["exact_match"]["value"]
    ]
    cheapest = min(schemes, key=lambda scheme: scheme["mean_tokens"])
    sentences = [
        f"Highest exact match: {best['label']}, "
        f"{report_tables.interval_percent(best['exact_match'])} %, with "
        f"{best['mean_tokens']:.0f} image tokens an image on average."
        if len(ties) == 1
        else f"Highest exact match: {', '.join(ties)} alike, "
        f"{report_tables.interval_percent(best['exact_match'])} %.",
    ]
    if len({scheme["mean_tokens"] for scheme in schemes}) > 1:
        sentences.append(
            f"Fewest image tokens: {cheapest['label']}, {cheapest['mean_tokens']:.0f} an image, exact "
            f"match {report_tables.interval_percent(cheapest['exact_match'])} %."
        )
    for pair in results.get("comparisons") or []:
        interval = pair["difference"]
        apart = interval["low"] > 0 or interval["high"] < 0
        verdict = (
            "the interval excludes 0 for these training runs"
            if apart
            else "the interval contains 0: no difference is shown"
        )
        sentences.append(
            f"{label[pair['name']]} minus {label[pair['other']]}, exact match: "
            f"{report_tables.signed_points(interval)} points"
            f"{_by_seed(pair)}; {verdict}."
        )
    return sentences


def _by_seed(pair: Comparison) -> str:
    if len(pair["seed_differences"]) < 2:
        return ""
    signed = [f"{100 * value:+.1f}".replace("-", "−") for value in pair["seed_differences"]]
    return f" (by training seed {', '.join(signed)})"


def limits(results: Results) -> list[str]:
    """Returns what the numbers do not show, a sentence each."""
    seeds, noun = results["run"]["seeds"], report_tables.noun(results)
    claim = (
        "A run of this size does not settle the paper’s claim about tiling, which "
        "rests on a model of billions of parameters and public benchmarks."
        if report_tables.compared(results) == "tiling scheme"
        else f"A run of this size does not settle which {noun} serves a model of billions of "
        "parameters best."
    )
    return [
        claim,
        f"Intervals come from resampling {schemes_images(results)} held-out images. They do not "
        f"contain the spread between training seeds; there "
        f"{'was one seed' if len(seeds) == 1 else f'were {len(seeds)} seeds'} a {noun}, so a small "
        f"difference may belong to the training run and not to the {noun}.",
    ]


def schemes_images(results: Results) -> int:
    """Returns the number of held-out images."""
    return results["schemes"][0]["num_images"]


def mark_errors(reading: str, truth: str) -> markupsafe.Markup:
    """Returns the reading as HTML with wrong, surplus and missing characters marked."""
    marked = []
    for text, kind in _aligned(reading, truth):
        if kind == "missing":
            marked.append(markupsafe.Markup('<b class="gap" title="missing">·</b>'))
        elif kind == "wrong":
            marked.append(markupsafe.Markup("<b>{}</b>").format(text))
        else:
            marked.append(markupsafe.escape(text))
    return markupsafe.Markup("").join(marked)


def _aligned(reading: str, truth: str) -> list[tuple[str, str]]:
    """Splits a reading into (text, 'right' | 'wrong' | 'missing'); place by place if as long."""
    if len(reading) == len(truth):
        pairs = zip(reading, truth, strict=True)
        return [(char, "right" if char == other else "wrong") for char, other in pairs]
    kinds = {"equal": "right", "replace": "wrong", "delete": "wrong", "insert": "missing"}
    matcher = difflib.SequenceMatcher(None, reading, truth, autojunk=False)
    return [(reading[start:stop], kinds[tag]) for tag, start, stop, _, _ in matcher.get_opcodes()]


def _data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _png_bytes(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def example_cards(results: Results, image_root: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the examples for the HTML page, pictures inlined (None where the file is gone)."""
    label = report_tables.labels(results)
    fits = {scheme["name"]: scheme["fit"] for scheme in results["schemes"]}
    cards = []
    for example in results.get("examples") or []:
        image = report_plots.open_example(example, image_root)
        readings = []
        for reading in example["readings"]:
            picture = None
            if image is not None:
                cols, rows = reading["grid"]
                drawn = report_plots.draw_grid(image, (cols, rows), fits[reading["scheme"]])
                picture = _data_uri(_png_bytes(drawn))
            readings.append(
                dict(reading)
                | {
                    "label": label[reading["scheme"]],
                    "grid_text": "×".join(map(str, reading["grid"])),
                    "picture": picture,
                    "marked": mark_errors(reading["reading"], example["truth"]),
                }
            )
        size = None if image is None else f"{image.width} × {image.height} pixels"
        cards.append(_card(example, size, readings))
    return cards


def _card(example: Example, size: str | None, readings: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": pathlib.PurePath(example["image"]).name,
        "truth": example["truth"],
        "bucket": example["bucket"],
        "size": size,
        "readings": readings,
    }


def markdown_cell(text: str) -> str:
    """Returns text safe inside a cell of a Markdown table."""
    return re.sub(r"([\\|`*_<\[\]])", r"\\\1", text).replace("\n", " ")


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=jinja2.select_autoescape(("html.j2",), default=False),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["cell"] = markdown_cell
    return environment


def _context(
    results: Results, plots: dict[str, pathlib.Path], image_root: pathlib.Path
) -> dict[str, Any]:
    several_seeds = len(results["run"]["seeds"]) > 1
    return {
        "run": results["run"],
        "compared": report_tables.compared(results),
        "noun": report_tables.noun(results),
        "design": results["run"].get("design", ""),
        "task": results["run"].get("task", "held-out samples"),
        "schemes": [scheme["label"] for scheme in results["schemes"]],
        "num_images": schemes_images(results),
        "seeds_text": report_tables.seeds_text(results),
        "interval_text": report_tables.interval_text(results),
        "findings": findings(results),
        "limits": limits(results),
        "accuracy": report_tables.accuracy_table(results),
        "seeds_table": report_tables.seeds_table(results) if several_seeds else None,
        "buckets": report_tables.bucket_table(results),
        "comparison": report_tables.comparison_table(results),
        "export": report_tables.export_tables(results),
        "export_statement": report_tables.export_statement(results),
        "run_tables": report_tables.run_tables(results),
        "plots": {
            name: {"file": f"plots/{path.name}", "title": _PLOT_TITLES[name], "uri": None}
            for name, path in plots.items()
        },
        "cards": example_cards(results, image_root),
    }


def write_report(
    results: Results,
    out_dir: str | pathlib.Path,
    image_root: str | pathlib.Path | None = None,
) -> dict[str, pathlib.Path]:
    """Writes the report, its plots and the results.

    Args:
      results: see `experiments.results`.
      out_dir: folder to write to; made if absent.
      image_root: folder that relative image paths of the examples start from; `out_dir` by
        default. Examples whose file is absent are shown without a picture.

    Returns:
      {"html": path, "md": path, "json": path, "<plot name>": path, ...}.

    Raises:
      ValueError: if a required part of the results is missing.
    """
    results_lib.check(results)
    out_dir = pathlib.Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    image_root = pathlib.Path(image_root) if image_root is not None else out_dir
    plots = report_plots.save_all(results, out_dir / "plots", image_root)
    context = _context(results, plots, image_root)
    for name, path in plots.items():
        context["plots"][name]["uri"] = _data_uri(path.read_bytes())
    paths = {"html": out_dir / "report.html", "md": out_dir / "report.md"}
    environment = _environment()
    for kind, path in paths.items():
        page = environment.get_template(f"report.{kind}.j2").render(context)
        path.write_text(page, encoding="utf-8")
    paths["json"] = out_dir / "results.json"
    results_lib.save(results, paths["json"])
    return paths | plots


def define_flags() -> None:
    """Defines the command's flags; not on import, where they could clash with another command's."""
    flags.DEFINE_string("results", None, "The results.json to report on.", required=True)
    flags.DEFINE_string("out", None, "Folder to write to; default: that of --results.")
    flags.DEFINE_string(
        "image_root", None, "Folder of the examples' images; default: that of --results."
    )


def main(argv: list[str]) -> None:
    """Reads results, writes the report and prints the tables."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    source = pathlib.Path(flags.FLAGS.results)
    results = results_lib.load(source)
    folder = source.parent
    paths = write_report(results, flags.FLAGS.out or folder, flags.FLAGS.image_root or folder)
    print(table_text(results), end="")
    print(f"\nReport: {paths['html']}")


if __name__ == "__main__":
    define_flags()
    logging.set_verbosity(logging.WARNING)
    app.run(guarded(main))
