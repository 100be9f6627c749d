"""From raw readings to the results dict: accuracies, intervals, comparisons, examples."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bluelm_jax.evals import metrics
from experiments.results import (
    BucketResult,
    Comparison,
    Example,
    ExportResult,
    Reading,
    Results,
    RunInfo,
    SchemeResult,
    SeedResult,
)
from experiments.statistics import bootstrap_mean, paired_bootstrap_difference


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchemeReadings:
    """Raw outcome of one scheme: n held-out images, R training seeds.

    Attributes:
      name: key, e.g. `llava_next`.
      label: name to show, e.g. `LLaVA-NeXT`.
      fit: `pad` or `stretch`, how the image fills its canvas (for drawing the grid).
      seeds: the R training seeds.
      predictions: R lists of n readings.
      train_seconds: R wall times of training.
      loss_curves: R lists of (step, loss).
      grids: n grids (columns, rows).
      views: n numbers of views.
      tokens: n numbers of image tokens.
    """

    name: str
    label: str
    fit: str
    seeds: Sequence[int]
    predictions: Sequence[Sequence[str]]
    train_seconds: Sequence[float]
    loss_curves: Sequence[Sequence[tuple[int, float]]]
    grids: Sequence[tuple[int, int]]
    views: Sequence[int]
    tokens: Sequence[int]

    def check(self, num_images: int) -> None:
        """Raises ValueError where a list has another length than the seeds or images."""
        for name in ("predictions", "train_seconds", "loss_curves"):
            if len(getattr(self, name)) != len(self.seeds):
                raise ValueError(
                    f"scheme {self.name!r}: {len(getattr(self, name))} {name} for "
                    f"{len(self.seeds)} seeds"
                )
        per_image = [self.grids, self.views, self.tokens, *self.predictions]
        for values in per_image:
            if len(values) != num_images:
                raise ValueError(
                    f"scheme {self.name!r}: a list of {len(values)} values for {num_images} images"
                )

    def scores(self, references: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns exact match and character accuracy, each float64 [R, n]."""
        functions = (metrics.exact_match, metrics.character_accuracy)
        exact, character = (
            np.array(
                [
                    [f(p, r) for p, r in zip(row, references, strict=True)]
                    for row in self.predictions
                ]
            )
            for f in functions
        )
        return exact, character


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """How intervals are made: see `experiments.statistics`."""

    confidence: float = 0.95
    num_resamples: int = 2000
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Returns the keyword arguments of the bootstrap functions."""
        return dataclasses.asdict(self)


def scheme_result(
    readings: SchemeReadings,
    references: Sequence[str],
    buckets: Sequence[str],
    bootstrap: Bootstrap,
) -> SchemeResult:
    """Summarises one scheme; buckets come in falling order of their counts."""
    readings.check(len(references))
    exact, character = readings.scores(references)
    names, counts = np.unique(np.asarray(buckets), return_counts=True)
    by_bucket = []
    for name in names[np.argsort(-counts, kind="stable")]:
        chosen = np.asarray(buckets) == name
        by_bucket.append(
            BucketResult(
                bucket=str(name),
                count=int(chosen.sum()),
                exact_match=bootstrap_mean(exact[:, chosen], **bootstrap.options()),
                character_accuracy=bootstrap_mean(character[:, chosen], **bootstrap.options()),
            )
        )
    others = [*references[1:], references[0]]
    return SchemeResult(
        name=readings.name,
        label=readings.label,
        fit=readings.fit,
        num_images=len(references),
        exact_match=bootstrap_mean(exact, **bootstrap.options()),
        character_accuracy=bootstrap_mean(character, **bootstrap.options()),
        chance_character_accuracy=float(readings.scores(others)[1].mean()),
        per_seed=_per_seed(readings, exact, character),
        buckets=by_bucket,
        mean_tokens=float(np.mean(readings.tokens)),
        p95_tokens=float(np.percentile(readings.tokens, 95)),
        mean_views=float(np.mean(readings.views)),
        train_seconds=float(np.mean(readings.train_seconds)),
        grids=_count_grids(readings.grids),
    )


def _per_seed(
    readings: SchemeReadings, exact: np.ndarray, character: np.ndarray
) -> list[SeedResult]:
    return [
        SeedResult(
            seed=int(seed),
            exact_match=float(exact[i].mean()),
            character_accuracy=float(character[i].mean()),
            train_seconds=float(readings.train_seconds[i]),
            loss_curve=[
                [int(step), float(loss) if np.isfinite(loss) else None]
                for step, loss in readings.loss_curves[i]
            ],
        )
        for i, seed in enumerate(readings.seeds)
    ]


def _count_grids(grids: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Counts by grid, smallest grids first."""
    ordered = sorted({tuple(grid) for grid in grids}, key=lambda g: (g[0] * g[1], g))
    as_tuples = [tuple(grid) for grid in grids]
    return {f"{cols}x{rows}": as_tuples.count((cols, rows)) for cols, rows in ordered}


def compare(
    first: SchemeReadings, second: SchemeReadings, references: Sequence[str], bootstrap: Bootstrap
) -> Comparison:
    """Compares two schemes image by image; a grid is smaller if it has fewer tiles."""
    tiles = [np.prod(np.asarray(scheme.grids), axis=1) for scheme in (first, second)]
    exact = [scheme.scores(references)[0] for scheme in (first, second)]
    by_seed = []
    if list(first.seeds) == list(second.seeds):
        by_seed = (exact[0].mean(axis=1) - exact[1].mean(axis=1)).tolist()
    return Comparison(
        name=first.name,
        other=second.name,
        smaller=int((tiles[0] < tiles[1]).sum()),
        equal=int((tiles[0] == tiles[1]).sum()),
        larger=int((tiles[0] > tiles[1]).sum()),
        difference=paired_bootstrap_difference(*exact, **bootstrap.options()),
        seed_differences=by_seed,
    )


def pick_examples(
    schemes: Sequence[SchemeReadings],
    references: Sequence[str],
    buckets: Sequence[str],
    images: Sequence[str],
    num_examples: int = 6,
) -> list[Example]:
    """Picks held-out images to show: half where the schemes' grids differ most, half where not.

    The rule looks at shapes and grids, never at who was right, so examples do not flatter a
    scheme. Buckets take turns. Readings are those of each scheme's first seed.
    """
    distinct = [len({tuple(scheme.grids[i]) for scheme in schemes}) for i in range(len(images))]
    differing = [
        index
        for number in sorted(set(distinct) - {1}, reverse=True)
        for index in _bucket_turns([i for i, d in enumerate(distinct) if d == number], buckets)
    ]
    same = _bucket_turns([i for i, d in enumerate(distinct) if d == 1], buckets)
    # Either half fills up for the other where it has too few.
    from_same = min(len(same), max(num_examples // 2, num_examples - len(differing)))
    chosen = differing[: num_examples - from_same] + same[:from_same]
    return [
        Example(
            image=str(images[i]),
            truth=references[i],
            bucket=buckets[i],
            readings=[_reading(scheme, i, references[i]) for scheme in schemes],
        )
        for i in chosen
    ]


def _bucket_turns(indices: Sequence[int], buckets: Sequence[str]) -> list[int]:
    """Reorders images: the first of every bucket, then the second of every bucket, and so on."""
    seen: dict[str, int] = {}
    turns = []
    for index in indices:
        turn = seen.get(buckets[index], 0)
        seen[buckets[index]] = turn + 1
        turns.append((turn, buckets[index], index))
    return [index for _, _, index in sorted(turns)]


def _reading(scheme: SchemeReadings, index: int, truth: str) -> Reading:
    text = scheme.predictions[0][index]
    return Reading(
        scheme=scheme.name,
        grid=[int(side) for side in scheme.grids[index]],
        views=int(scheme.views[index]),
        tokens=int(scheme.tokens[index]),
        reading=text,
        correct=bool(metrics.exact_match(text, truth)),
    )


def build_results(
    run: RunInfo,
    schemes: Sequence[SchemeReadings],
    *,
    references: Sequence[str],
    buckets: Sequence[str],
    images: Sequence[str],
    subject: str = "relaxed",
    num_examples: int = 6,
    export: ExportResult | None = None,
    export_note: str = "",
    bootstrap: Bootstrap | None = None,
) -> Results:
    """Builds the results of a comparison from raw readings.

    Args:
      run: how it was made.
      schemes: the schemes, each over the same n images in the same order.
      references: n true texts.
      buckets: n bucket names.
      images: n image paths.
      subject: name of the scheme compared with each of the others; absent, nothing is compared.
      num_examples: images to show.
      export: outcome of the export, if it ran.
      export_note: why it did not run.
      bootstrap: how intervals are made.

    Raises:
      ValueError: if lists differ in length or a name occurs twice.
    """
    bootstrap = bootstrap or Bootstrap()
    names = [scheme.name for scheme in schemes]
    if len(set(names)) != len(names):
        raise ValueError(f"scheme names {names}: must differ")
    if not len(references) == len(buckets) == len(images) > 0:
        raise ValueError(
            f"{len(references)} references, {len(buckets)} buckets, {len(images)} images: "
            "must be as many, and at least one"
        )
    summaries = [scheme_result(scheme, references, buckets, bootstrap) for scheme in schemes]
    main = [scheme for scheme in schemes if scheme.name == subject]
    rivals = [scheme for scheme in schemes if scheme.name != subject]
    return Results(
        run=run,
        confidence=bootstrap.confidence,
        num_resamples=bootstrap.num_resamples,
        schemes=summaries,
        comparisons=[compare(m, other, references, bootstrap) for m in main for other in rivals],
        examples=pick_examples(schemes, references, buckets, images, num_examples),
        export=export,
        export_note=export_note,
    )
