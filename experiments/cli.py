"""What the absl entry points share: flags, error reporting, progress bars."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from absl import app, flags, logging
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from bluelm_jax import checkpoints, config, layout, params, vlm
from experiments import gin_setup

GIN_FILE = flags.DEFINE_multi_string("gin_file", [], "Gin config file; may be repeated.")
GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings",
    [],
    "Gin binding 'Name.field = value', applied after the files; may be repeated.",
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the resolved config, parameters and batch shapes, and stop."
)

USER_ERRORS = (
    ValueError,
    FloatingPointError,
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)


def run(main: Callable[[list[str]], None]) -> None:
    """Runs an absl main; a user's mistake ends in one message and exit status 2, not a traceback.

    `--v=1` shows the traceback as well.
    """

    def guarded(argv: list[str]) -> None:
        if len(argv) > 1:
            fail(f"unexpected arguments {argv[1:]}; options start with --")
        try:
            main(argv)
        except USER_ERRORS as e:
            if logging.get_verbosity() > 0:
                raise
            fail(str(e))
        except OSError as e:  # no space left, too many files, ...
            fail(f"{e.strerror}: {e.filename}" if e.filename else str(e))
        except KeyboardInterrupt:
            print("interrupted; the same command continues where this stopped", file=sys.stderr)
            sys.exit(130)

    logging.set_verbosity(logging.WARNING)
    app.run(guarded, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as e:
        fail(f"{e} (--help lists the flags)")
        raise  # Not reached: `fail` exits.


def fail(message: str) -> None:
    """Prints `error: message` and exits with status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def build(root: type[gin_setup.T], default_file: str | None = None) -> gin_setup.T:
    """The `root` that --gin_file (or else `default_file`) and --gin_bindings describe."""
    repository = str(Path(__file__).resolve().parents[1])
    files = GIN_FILE.value or ([default_file] if default_file else [])
    return gin_setup.build(root, files, GIN_BINDINGS.value, search=(repository,))


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


def num_parameters(model: config.VLMConfig) -> int:
    """Parameters of the whole model."""
    return params.count(vlm.specs(model))


def load_weights(directory: str | Path, model: config.VLMConfig):
    """The newest weights under `directory` (a run or its checkpoints directory)."""
    path = Path(directory)
    path = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return checkpoints.restore_params(path, params.abstract(vlm.specs(model)))
