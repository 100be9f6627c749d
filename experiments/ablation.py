"""Trains variants of one run from the same start, with the same steps, seeds and data order.

Only what a variant names differs. The room that its batches need (row length, tiles) is measured
from image headers first, so every variant sees the same samples in the same steps.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from bluelm_jax import config, metrics_log, run_folder, schemes, serialize
from bluelm_jax import train as train_lib
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import SourceConfig
from bluelm_jax.run_config import RunConfig
from experiments import cli, evaluation, kept, summarise
from experiments.evaluation import EvalConfig, Reading
from gin_configs import binding

Bar = Callable[..., AbstractContextManager]


@binding.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One arm of an ablation: its name in tables and paths, its label, and what it changes.

    Attributes:
      tiling, downsampler, projector: in place of the base run's; None keeps that.
    """

    name: str
    label: str
    tiling: schemes.Tiling | None = None
    downsampler: config.Downsampler | None = None
    projector: config.ProjectorConfig | None = None

    def __post_init__(self):
        ok = self.name.replace("_", "").replace(".", "").isalnum()
        config.check(self, "name", ok, "letters, digits, '_' and '.'")

    def apply(self, base: RunConfig) -> RunConfig:
        """`base` with this arm's parts; the room of its batches is not measured yet.

        Raises:
          ValueError: they do not fit the base's other parts.
        """
        parts = {"downsampler": self.downsampler, "projector": self.projector}
        parts = {name: part for name, part in parts.items() if part is not None}
        model = dataclasses.replace(base.model, **parts)
        data = dataclasses.replace(base.data, tiling=self.tiling or base.data.tiling)
        return dataclasses.replace(base, model=model, data=data)


@binding.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation:
    """A base run, its variants and seeds, and the held-out samples that decide.

    Attributes:
      base: trained once for each variant and seed; a seed sets weights (unless `init_from` gives
        them) and data order.
      subject: the variant that the others are compared with.
    """

    base: RunConfig
    variants: tuple[Variant, ...]
    evaluation: EvalConfig
    eval_source: SourceConfig
    subject: str = "relaxed"
    seeds: tuple[int, ...] = (0,)

    def __post_init__(self):
        names = [v.name for v in self.variants]
        config.check(self, "variants", len(names) > 0, "at least one")
        config.check(self, "variants", len(set(names)) == len(names), "of different names")
        config.check(self, "seeds", len(self.seeds) > 0, "at least one")
        config.check(self, "seeds", len(set(self.seeds)) == len(self.seeds), "all different")
        config.check(self, "subject", self.subject in names, f"one of the variants {names}")

    @property
    def compared(self) -> str:
        """What the arms are, in the report's words."""
        tilings = {v.tiling for v in self.variants}
        models = {(v.downsampler, v.projector) for v in self.variants}
        if len(models) == 1:
            return "tiling scheme"
        return "token downsampler" if len(tilings) == 1 else "variant"


def select(plan: Ablation, names: Sequence[str]) -> Ablation:
    """`plan` with the named variants alone, in its own order.

    The first of them becomes the subject where the plan's is not among them.

    Raises:
      ValueError: a name that no variant has, or none at all.
    """
    known = [v.name for v in plan.variants]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        wrong = f"no variant is named {', '.join(map(repr, unknown))}" if unknown else "no name"
        raise ValueError(f"--only: {wrong}; the variants are {', '.join(known)}")
    kept = tuple(v for v in plan.variants if v.name in names)
    subject = plan.subject if plan.subject in names else kept[0].name
    return dataclasses.replace(plan, variants=kept, subject=subject)


def fit_room(run: RunConfig) -> RunConfig:
    """`run` with row length and tiles a group set to what its own batches need.

    Packed rows keep their length; their tiles a group are those that fill both best.

    Rows end at the model's `max_length`; a longer sample then meets `DataConfig.on_overlong`, which
    names it.

    Raises:
      ValueError: no sample is left to train on.
    """
    pipeline = Pipeline(run.data, side=run.token_side)
    if run.data.packing is not None:
        tiles = pipeline.measure_packing().tiles_per_group
        return dataclasses.replace(run, data=dataclasses.replace(run.data, tiles_per_group=tiles))
    room = pipeline.measure(run.train.steps)
    length = min(room.max_length, run.model.decoder.max_length)
    data = dataclasses.replace(run.data, seq_len=length, tiles_per_group=room.tiles_per_group)
    return dataclasses.replace(run, data=data)


def variant_run(base: RunConfig, variant: Variant, seed: int) -> RunConfig:
    """The run of one arm."""
    run = variant.apply(base)
    data = dataclasses.replace(run.data, seed=seed)
    train = dataclasses.replace(run.train, seed=seed)
    return fit_room(dataclasses.replace(run, data=data, train=train))


def run_directory(workdir: Path, variant: Variant, seed: int, seeds: Sequence[int]) -> Path:
    """`workdir`/<variant>, with -seed<n> when there are several."""
    suffix = f"-seed{seed}" if len(seeds) > 1 else ""
    return workdir / f"{variant.name}{suffix}"


@dataclasses.dataclass(frozen=True)
class ArmResult:
    """One trained arm: its directory, seconds of training over all starts, its readings."""

    directory: Path
    seconds: float
    readings: list[Reading]


def train_or_resume(run: RunConfig, directory: Path, bar: Bar = cli.progress_bar) -> float:
    """Trains to the end unless that was done before; returns the seconds of all starts together.

    Raises:
      ValueError: the directory holds a run of another config; the message says what to do.
    """
    timing = directory / "seconds.json"
    spent = kept.load(timing, "seconds of training") or 0.0
    cli.check_same_run(run, directory)
    done = cli.steps_done(directory)
    if done >= run.train.steps:
        return spent
    start = time.monotonic()
    try:
        with bar(f"train {directory.name}", run.train.steps, done) as progress:
            train_lib.train(run, directory, progress)
    finally:  # An interrupted start counts too.
        spent += time.monotonic() - start
        if directory.is_dir():
            kept.save(timing, "seconds of training", spent)
    return spent


def run_arm(
    ablation: Ablation, variant: Variant, seed: int, workdir: Path, bar: Bar = cli.progress_bar
) -> ArmResult:
    """Trains and evaluates one arm, or takes up what an earlier start left."""
    directory = run_directory(workdir, variant, seed, ablation.seeds)
    run = variant_run(ablation.base, variant, seed)
    seconds = train_or_resume(run, directory, bar)
    path = directory / "readings.json"
    settings = {
        "run": serialize.to_plain(run),
        "source": serialize.to_plain(ablation.eval_source),
        "evaluation": dataclasses.asdict(ablation.evaluation),
    }
    rows = kept.load(path, settings)
    if rows is not None:
        return ArmResult(directory, seconds, evaluation.readings_from(rows))
    weights = run_folder.load_weights(directory, run.model)
    total = evaluation.num_samples(ablation.eval_source, ablation.evaluation)
    with bar(f"read with {directory.name}", total) as progress:
        readings = evaluation.evaluate(
            weights, run, ablation.eval_source, ablation.evaluation, progress
        )
    kept.save(path, settings, [dataclasses.asdict(r) for r in readings])
    return ArmResult(directory, seconds, readings)


def scheme_readings(
    ablation: Ablation, variant: Variant, arms: Sequence[ArmResult]
) -> summarise.SchemeReadings:
    """What the report needs of a variant, over its seeds."""
    first, run = arms[0].readings, variant.apply(ablation.base)
    return summarise.SchemeReadings(
        name=variant.name,
        label=variant.label,
        fit=run.data.tiling.resolved_fit,
        seeds=list(ablation.seeds),
        predictions=[[r.prediction for r in arm.readings] for arm in arms],
        train_seconds=[arm.seconds for arm in arms],
        loss_curves=[loss_curve(arm.directory) for arm in arms],
        grids=[r.grid or (0, 0) for r in first],
        views=[r.views for r in first],
        tokens=[r.tokens for r in first],
    )


def loss_curve(directory: Path) -> list[tuple[int, float]]:
    """(step, loss) of a run's log."""
    lines = metrics_log.read_lines(directory / "metrics.jsonl")
    return [(int(line["step"]), line["loss"]) for line in lines]


def check_held_out(ablation: Ablation) -> None:
    """Reads the held-out samples' headers, so that a bad one shows before anything is trained."""
    for variant in ablation.variants:
        run = variant.apply(ablation.base)
        how = ablation.evaluation
        new_tokens = how.sampling.max_new_tokens
        evaluation.eval_run(run, ablation.eval_source, how.batch_size, new_tokens)


def run_ablation(
    ablation: Ablation, workdir: Path, bar: Bar = cli.progress_bar
) -> tuple[list[summarise.SchemeReadings], list[Reading]]:
    """All arms, variant by variant; returns their readings and one arm's samples."""
    results, samples = [], []
    for variant in ablation.variants:
        arms = [run_arm(ablation, variant, seed, workdir, bar) for seed in ablation.seeds]
        results.append(scheme_readings(ablation, variant, arms))
        samples = samples or arms[0].readings
    return results, samples
