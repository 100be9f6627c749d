"""What the experiments share: progress bars, model summaries, finding a run's weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bluelm_jax import checkpoints, config, layout, params, serialize, vlm
from bluelm_jax.run_config import RunConfig


@contextlib.contextmanager
def progress_bar(description: str, total: int, done: int = 0) -> Iterator[Callable]:
    """A bar with elapsed time and ETA; yields update(step, {name: number})."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("eta"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task(f"{description:<22}", total=total, completed=done, note="")

        def update(step: int, metrics: dict[str, float] | None = None) -> None:
            bar.update(task, completed=step)
            if metrics:
                names = ("loss", "accuracy")
                note = "  ".join(f"{k} {metrics[k]:.3f}" for k in names if k in metrics)
                bar.update(task, note=note)

        yield update


def model_summary(model: config.VLMConfig) -> str:
    """Parameters by part and tokens a view, one a line."""
    specs = vlm.specs(model)
    counts = {part: params.count(tree) for part, tree in specs.items()}
    lines = [f"  {part:<12} {n:>15,}" for part, n in counts.items()]
    total = sum(counts.values())
    side = layout.token_side(model)
    return "\n".join(
        [
            "parameters",
            *lines,
            f"  {'total':<12} {total:>15,}   ({total * 4 / 2**30:.2f} GiB in float32)",
            f"tokens a view: {model.vision.side}x{model.vision.side} patches -> "
            f"{side}x{side} = {side**2}",
        ]
    )


def steps_done(directory: str | Path) -> int:
    """Step of the newest checkpoint of a run; 0 when there is none."""
    path = Path(directory) / "checkpoints"
    return checkpoints.latest_step(path) or 0


# Fields of a run that may change between its starts: none of them changes what a step computes,
# except that more steps stretch the learning-rate schedule.
FREE = {
    "steps",
    "log_every",
    "save_every",
    "keep_checkpoints",
    "num_workers",
    "num_threads",
    "mesh",
}


def check_same_run(run: RunConfig, directory: Path) -> None:
    """Raises ValueError if `directory` holds checkpoints of a run that computed something else."""
    path = directory / "config.json"
    if not (path.is_file() and steps_done(directory)):
        return
    before, now = (_flat(serialize.to_plain(r)) for r in (serialize.load_run_config(path), run))
    changed = sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))
    changed = [k for k in changed if not FREE & set(k.split("."))]
    if changed:
        shown = "; ".join(f"{k} {before.get(k)!r} -> {now.get(k)!r}" for k in changed[:6])
        raise ValueError(
            f"{directory} holds a run of another config, {len(changed)} differences: {shown}. "
            "Choose another --workdir (TrainConfig.init_from takes its weights) or remove it"
        )


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Leaves of nested dicts by their dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    parts = (_flat(v, f"{name}.{k}" if name else k) for k, v in value.items())
    return {k: v for part in parts for k, v in part.items()}


def num_parameters(model: config.VLMConfig) -> int:
    """Parameters of the whole model."""
    return params.count(vlm.specs(model))


def load_weights(directory: str | Path, model: config.VLMConfig):
    """The newest weights under `directory` (a run or its checkpoints directory)."""
    path = Path(directory)
    path = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return checkpoints.restore_params(path, params.abstract(vlm.specs(model)))
