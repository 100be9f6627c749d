"""The report's tables as text cells, shared by the terminal, Markdown and HTML."""

import dataclasses
import io

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from experiments.results import Results, StageTime
from experiments.statistics import Interval

TERMINAL_WIDTH = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table of finished text.

    Attributes:
      title: what it shows.
      columns: headings; the first column holds names, the others figures.
      rows: one list of cells a row, as long as `columns`.
      note: how to read it.
    """

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"table {self.title!r}: {len(row)} cells for {len(self.columns)} columns: {row}"
                )


def percent(share: float) -> str:
    """Returns a share of 0..1 as a percentage with one decimal, e.g. '71.2'."""
    return f"{100 * share:.1f}"


def interval_percent(interval: Interval) -> str:
    """Returns e.g. '71.2 [67.1, 75.0]'."""
    low, high = percent(interval["low"]), percent(interval["high"])
    return f"{percent(interval['value'])} [{low}, {high}]"


def signed_points(interval: Interval) -> str:
    """Returns a difference in percentage points, e.g. '+2.1 [−0.4, +4.6]'."""
    value, low, high = (
        f"{100 * interval[key]:+.1f}".replace("-", "−") for key in ("value", "low", "high")
    )
    return f"{value} [{low}, {high}]"


def duration(seconds: float) -> str:
    """Returns e.g. '42.0 s' or '3 min 05 s'."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def file_size(num_bytes: int) -> str:
    """Returns e.g. '734 kB' or '12.3 MB' (decimal units)."""
    if num_bytes < 1_000_000:
        return f"{num_bytes / 1000:.0f} kB"
    return f"{num_bytes / 1e6:.1f} MB"


def labels(results: Results) -> dict[str, str]:
    """Returns scheme name -> label."""
    return {scheme["name"]: scheme["label"] for scheme in results["schemes"]}


def compared(results: Results) -> str:
    """Returns what the schemes are: 'tiling scheme', 'token downsampler'."""
    return results["run"].get("compared", "tiling scheme")


def noun(results: Results) -> str:
    """Returns the last word of `compared`."""
    return compared(results).split()[-1]


def seeds_text(results: Results) -> str:
    """Returns e.g. 'one training seed (0)' or '3 training seeds (0, 1, 2)'."""
    seeds = results["run"]["seeds"]
    listed = ", ".join(map(str, seeds))
    return (
        f"{'one training seed' if len(seeds) == 1 else f'{len(seeds)} training seeds'} ({listed})"
    )


def interval_text(results: Results) -> str:
    """Returns what the brackets mean."""
    return (
        f"[ ]: {100 * results['confidence']:g} % percentile bootstrap interval over "
        f"{results['schemes'][0]['num_images']} held-out images "
        f"({results['num_resamples']} resamples)"
    )


def accuracy_table(results: Results) -> Table:
    """Accuracy and cost of each scheme."""
    rows = []
    for scheme in results["schemes"]:
        rows.append(
            [
                scheme["label"],
                interval_percent(scheme["exact_match"]),
                interval_percent(scheme["character_accuracy"]),
                f"{scheme['mean_tokens']:.0f} / {scheme['p95_tokens']:.0f}",
                f"{scheme['mean_views']:.2f}",
                duration(scheme["train_seconds"]),
            ]
        )
    chance = max(scheme["chance_character_accuracy"] for scheme in results["schemes"])
    return Table(
        title="Accuracy and cost",
        columns=[
            noun(results).capitalize(),
            "Exact match, %",
            "Characters, %",
            "Tokens, mean / p95",
            "Views",
            "Train",
        ],
        rows=rows,
        note=f"{interval_text(results)}; {seeds_text(results)}. Characters: 1 − edit distance / "
        f"reference length, floored at 0; against other images’ answers the same readings score up "
        f"to {percent(chance)} %. Tokens and views: image tokens, and tiles plus thumbnail, an "
        "image. Train: wall time of one training run.",
    )


def seeds_table(results: Results) -> Table:
    """Exact match of each training seed."""
    seeds = results["run"]["seeds"]
    rows = []
    for scheme in results["schemes"]:
        found = {result["seed"]: percent(result["exact_match"]) for result in scheme["per_seed"]}
        rows.append([scheme["label"], *(found.get(seed, "–") for seed in seeds)])
    return Table(
        title="Exact match by training seed, %",
        columns=[noun(results).capitalize(), *(f"Seed {seed}" for seed in seeds)],
        rows=rows,
        note="The spread between seeds is a source of error that the intervals do not contain.",
    )


def bucket_table(results: Results) -> Table:
    """Exact match by page shape and size; schemes are columns."""
    schemes = results["schemes"]
    counts: dict[str, int] = {}
    for scheme in schemes:
        counts |= {bucket["bucket"]: bucket["count"] for bucket in scheme["buckets"]}
    rows = []
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        cells = [
            next(
                (interval_percent(b["exact_match"]) for b in s["buckets"] if b["bucket"] == name),
                "–",
            )
            for s in schemes
        ]
        rows.append([name, str(count), *cells])
    return Table(
        title="Exact match by page shape and size, %",
        columns=["Bucket", "Images", *(scheme["label"] for scheme in schemes)],
        rows=rows,
        note=f"{interval_text(results)}, resampled within the bucket. Buckets of a few images say "
        "little, and one where all or no page is read has an interval without width.",
    )


def comparison_table(results: Results) -> Table | None:
    """Grids and exact match of one scheme against the others; None if nothing was compared."""
    label = labels(results)
    rows = [
        [
            f"{label[c['name']]} against {label[c['other']]}",
            str(c["smaller"]),
            str(c["equal"]),
            str(c["larger"]),
            signed_points(c["difference"]),
        ]
        for c in results.get("comparisons") or []
    ]
    if not rows:
        return None
    return Table(
        title="Image by image",
        columns=["Pair", "Fewer tiles", "Equal", "More tiles", "Exact match difference, points"],
        rows=rows,
        note=f"Held-out images on which the first {noun(results)} has fewer, as many or more tiles "
        "than the second; difference of exact match, first minus second, with a paired bootstrap "
        "interval. An interval that contains 0 shows no difference.",
    )


def export_tables(results: Results) -> list[Table]:
    """Accuracy, file sizes and stage times of the exported model; empty if none was exported."""
    export = results.get("export")
    if not export:
        return []
    tables = [
        Table(
            title="Exported model: accuracy",
            columns=["Form", "Exact match, %", "Characters, %", "Same reading as JAX float, %"],
            rows=[
                [
                    row["name"],
                    percent(row["exact_match"]),
                    percent(row["character_accuracy"]),
                    "–" if row["agreement"] is None else percent(row["agreement"]),
                ]
                for row in export["rows"]
            ],
            note=f"On {export['num_images']} held-out images.",
        )
    ]
    if export["files"]:
        rows = [[file["name"], file_size(file["bytes"])] for file in export["files"]]
        tables.append(Table(title="Exported model: files", columns=["File", "Size"], rows=rows))
    if export["stages"]:
        tables.append(_stage_table(export["stages"], results["run"]["device"]))
    return tables


def _stage_table(times: list[StageTime], device: str) -> Table:
    variants = list(dict.fromkeys(time["variant"] for time in times))
    found = {(time["stage"], time["variant"]): f"{time['ms']:.2f}" for time in times}
    stages = list(dict.fromkeys(time["stage"] for time in times))
    return Table(
        title="Exported model: time of one call, ms",
        columns=["Stage", *variants],
        rows=[[s, *(found.get((s, variant), "–") for variant in variants)] for s in stages],
        note=f"Measured on {device}, not on a phone.",
    )


def run_tables(results: Results) -> list[Table]:
    """Wall times, and the data, steps and configuration of the run."""
    run = results["run"]
    phases = [[phase["name"], duration(phase["seconds"])] for phase in run["phases"]]
    total = sum(phase["seconds"] for phase in run["phases"])
    tables = [
        Table(
            title="Wall time",
            columns=["Phase", "Time"],
            rows=[*phases, ["Sum", duration(total)]],
            note=f"Peak resident memory {run['peak_rss_mb']:.0f} MB on {run['device']}.",
        )
    ]
    for title, key in (("Data", "data"), ("Training steps", "steps"), ("Configuration", "config")):
        if run[key]:
            rows = [[str(name), str(value)] for name, value in run[key].items()]
            tables.append(Table(title=title, columns=["Name", "Value"], rows=rows))
    return tables


def export_statement(results: Results) -> str:
    """Returns what to say when there is no export, else an empty string."""
    if results.get("export"):
        return ""
    note = results.get("export_note") or "no reason was recorded"
    return f"The export was not run: {note.rstrip('.')}."


def table_text(results: Results, width: int = TERMINAL_WIDTH) -> str:
    """Returns the main tables as plain text for a terminal of `width` columns."""
    tables = [accuracy_table(results), comparison_table(results), *export_tables(results)]
    buffer = io.StringIO()
    console = Console(file=buffer, width=width, color_system=None, highlight=False)
    for table in tables:
        if table is None:
            continue
        drawn = RichTable(
            title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for index, column in enumerate(table.columns):
            drawn.add_column(column, justify="right" if index else "left", overflow="fold")
        for row in table.rows:
            drawn.add_row(*(cell.replace("[", r"\[") for cell in row))
        console.print(drawn)
        if table.note:
            console.print(table.note, markup=False)
            console.print()
    if statement := export_statement(results):
        console.print(statement, markup=False)
    lines = buffer.getvalue().splitlines()
    return "\n".join(line.rstrip() for line in lines).strip() + "\n"
