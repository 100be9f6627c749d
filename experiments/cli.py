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

from bluelm_jax import checkpoints, config, flops, layout, params, serialize, vlm
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


_BYTES = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))
_FLOPS = ((10**12, "TFLOP"), (10**9, "GFLOP"), (10**6, "MFLOP"), (10**3, "kFLOP"), (1, "FLOP"))


def _unit(value: float, units: tuple[tuple[int, str], ...], least: float = 1) -> tuple[int, str]:
    """The largest unit of which `value` holds `least` or more; the smallest where none."""
    return next((unit for unit in units if value >= least * unit[0]), units[-1])


def size_text(size: int) -> str:
    """Bytes in words, such as '6.30 GB' or '12.40 kB'."""
    scale, name = _unit(size, _BYTES)
    return f"{size / scale:.2f} {name}" if scale > 1 else f"{size} {name}"


@contextlib.contextmanager
def byte_bar(description: str, size: int) -> Iterator[Callable[[int], None]]:
    """A bar over bytes in a unit of which there are a hundred or more; yields update(bytes)."""
    scale, name = _unit(size, _BYTES[1:], least=100)
    # Rounded up, so that the last byte fills the bar.
    with progress_bar(f"{description}, {name}", -(-size // scale)) as update:
        yield lambda done: update(-(-done // scale))


def model_summary(model: config.VLMConfig) -> str:
    """Parameters by part and tokens a view, one a line."""
    specs = vlm.specs(model)
    counts = {part: params.count(tree) for part, tree in specs.items()}
    lines = [f"  {part:<12} {n:>15,}" for part, n in counts.items()]
    total = sum(counts.values())
    patches, side = model.vision.side, layout.token_side(model)
    shape = "" if isinstance(side, layout.Unordered) else f"{side}x{side} = "
    return "\n".join(
        [
            "parameters",
            *lines,
            f"  {'total':<12} {total:>15,}   ({total * 4 / 2**30:.2f} GiB in float32)",
            f"tokens a view: {patches}x{patches} patches -> {shape}{layout.tokens_per_view(side)}",
        ]
    )


def cost_summary(run: RunConfig) -> str:
    """FLOPs of a row and bytes that it keeps for the backward pass, one a line."""
    cost = flops.step_cost(run)
    rows = run.data.batch_size // run.train.accumulation
    data = run.data
    tiles = data.tile_groups * data.tiles_per_group / data.batch_size
    scale, unit = _unit(cost.forward_flops / rows, _FLOPS)
    return "\n".join(
        [
            f"a row of {data.seq_len:,} positions and {tiles:g} tiles (matrix products only)",
            f"  forward      {cost.forward_flops / rows / scale:>15,.3f} {unit}",
            f"  step         {cost.step_flops / rows / scale:>15,.3f} {unit}, recomputation included",
            f"  kept for the backward pass {cost.kept_bytes / rows / 2**20:,.1f} MiB",
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
