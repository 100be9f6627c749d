"""What a comparison of tiling schemes found, as one JSON-serialisable dict: its parts.

`summarise.build_results` makes it from raw readings; the report is made from the dict alone, so
it can be made again from `results.json` later. Shares lie in 0..1.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

from experiments.statistics import Interval


class Phase(TypedDict):
    """One part of the run and its wall time."""

    name: str
    seconds: float


class RunInfo(TypedDict):
    """How the run was made.

    `config`, `data` and `steps` are shown as they are: name -> number or short text.
    `commands` repeat the run, one command each. `design` says in a sentence or two what the
    schemes had in common and what not (data, steps, fit, view order): only the job knows. `task`
    says what the schemes read, to stand behind "on". `compared` is what a scheme is, "tiling scheme"
    unless it is something else, such as "token downsampler".
    """

    seeds: list[int]
    version: str
    commit: str
    device: str
    phases: list[Phase]
    peak_rss_mb: float
    tile_size: int
    data: dict[str, Any]
    steps: dict[str, Any]
    config: dict[str, Any]
    commands: list[str]
    design: NotRequired[str]
    task: NotRequired[str]
    compared: NotRequired[str]


class SeedResult(TypedDict):
    """One training run of a scheme.

    `loss_curve` holds [step, loss] pairs; a loss that was not finite is None.
    """

    seed: int
    exact_match: float
    character_accuracy: float
    train_seconds: float
    loss_curve: list[list[float | None]]


class BucketResult(TypedDict):
    """Accuracy over the images of one bucket."""

    bucket: str
    count: int
    exact_match: Interval
    character_accuracy: Interval


class SchemeResult(TypedDict):
    """One tiling scheme over all held-out images, mean over its seeds.

    `chance_character_accuracy` scores the readings against other images' references: what the
    edit distance gives for nothing. `grids` counts images by grid, "columns x rows".
    """

    name: str
    label: str
    fit: str
    num_images: int
    exact_match: Interval
    character_accuracy: Interval
    chance_character_accuracy: float
    per_seed: list[SeedResult]
    buckets: list[BucketResult]
    mean_tokens: float
    p95_tokens: float
    mean_views: float
    train_seconds: float
    grids: dict[str, int]


class Comparison(TypedDict):
    """`name` against `other` on the same images: whose grid has fewer tiles, who reads more.

    `difference` is exact match of `name` minus exact match of `other`; `seed_differences` holds
    the same difference for each training seed, and is empty if the schemes' seeds differ.
    """

    name: str
    other: str
    smaller: int
    equal: int
    larger: int
    difference: Interval
    seed_differences: list[float]


class Reading(TypedDict):
    """What one scheme read on an example. `grid` is [columns, rows]."""

    scheme: str
    grid: list[int]
    views: int
    tokens: int
    reading: str
    correct: bool


class Example(TypedDict):
    """One held-out image; `image` is a path, relative ones to the report's `image_root`."""

    image: str
    truth: str
    bucket: str
    readings: list[Reading]


class ExportRow(TypedDict):
    """One form of the model; `agreement` is the share of its readings equal to JAX float's."""

    name: str
    exact_match: float
    character_accuracy: float
    agreement: float | None


class ExportFile(TypedDict):
    """One written model file."""

    name: str
    bytes: int


class StageTime(TypedDict):
    """Milliseconds of one call of a stage (vision tile batch, projector, prefill chunk, ...)."""

    stage: str
    variant: str
    ms: float


class ExportResult(TypedDict):
    """The exported model beside the JAX one, on `num_images` held-out images."""

    num_images: int
    rows: list[ExportRow]
    files: list[ExportFile]
    stages: list[StageTime]


class Results(TypedDict):
    """Everything a report shows.

    Without `export` the report says that it did not run, and why if `export_note` is given.
    """

    run: RunInfo
    confidence: float
    num_resamples: int
    schemes: list[SchemeResult]
    comparisons: NotRequired[list[Comparison]]
    examples: NotRequired[list[Example]]
    export: NotRequired[ExportResult | None]
    export_note: NotRequired[str]


def save(results: Results, path: str | pathlib.Path) -> None:
    """Writes results as JSON; raises ValueError for numbers that JSON has not (NaN)."""
    text = json.dumps(results, indent=1, allow_nan=False)
    pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def load(path: str | pathlib.Path) -> Results:
    """Reads results, and checks that the required parts are there.

    Raises:
      ValueError: naming the file, if it is not JSON or lacks a part.
    """
    try:
        results = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    check(results, str(path))
    return results


def check(results: Mapping[str, Any], where: str = "results") -> None:
    """Raises ValueError, naming the first required part that `results` lacks."""
    if not isinstance(results, Mapping):
        raise ValueError(f"{where}: expected an object, found {type(results).__name__}")
    required = [(results, Results, "")]
    required += [(results.get("run", {}), RunInfo, "run.")]
    required += [
        (scheme, SchemeResult, f"schemes[{i}].")
        for i, scheme in enumerate(results.get("schemes", []))
    ]
    for part, kind, prefix in required:
        missing = sorted(kind.__required_keys__ - part.keys())
        if missing:
            raise ValueError(f"{where}: no {prefix}{missing[0]}")
    if not results["schemes"]:
        raise ValueError(f"{where}: schemes is empty")
