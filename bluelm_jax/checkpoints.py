"""Saving and restoring; the only file that knows orbax.

A checkpoint holds the train state (step, parameters, optimizer), the data iterator's state, and the
resolved config as text. Restoring takes abstract arrays with shardings, so a run may come back on
another mesh; weights alone can be taken as the start of the next stage.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from bluelm_jax.checkpoint_stream import Streamed, StreamHandler
from bluelm_jax.params import Tree


class CheckpointError(ValueError):
    """A checkpoint that is missing, of another model, or cannot be written."""


class Checkpointer:
    """Checkpoints of one run, newest few kept, in `directory`/<step>."""

    def __init__(self, directory: str | Path, keep: int = 2):
        self.directory = Path(directory).absolute()
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=False
        )
        try:
            self._manager = ocp.CheckpointManager(self.directory, options=options)
        except OSError as e:
            raise CheckpointError(f"cannot use {self.directory} for checkpoints: {e}") from e

    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: Tree, data_state: dict[str, Any], config: str) -> None:
        """Writes a checkpoint; an older one is removed only after this one is complete.

        Raises:
          CheckpointError: the directory cannot be written (no space, no permission).
        """
        if step == self.latest():
            return
        args = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            data=ocp.args.JsonSave(data_state),
            config=ocp.args.JsonSave({"config": config}),
        )
        try:
            self._manager.save(step, args=args)
            self._manager.wait_until_finished()
        except (OSError, ValueError) as e:
            raise CheckpointError(f"cannot write checkpoint {step} to {self.directory}: {e}") from e

    def restore(self, abstract: Tree, step: int | None = None) -> tuple[Tree, dict[str, Any]]:
        """Returns (train state, data state) laid out as `abstract` says.

        Raises:
          CheckpointError: no checkpoint there, a damaged one, or one of another model or stage
            (names and shapes listed).
        """
        step = self._existing(step)
        path = self.directory / str(step)
        _check_same(path, _stored_shapes(path / "state"), _shapes(abstract))
        args = ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()
        )
        with _reading(path):
            restored = self._manager.restore(step, args=args)
        return restored["state"], restored["data"]

    def _existing(self, step: int | None) -> int:
        step = self.latest() if step is None else step
        if step is None:
            raise CheckpointError(f"no checkpoint in {self.directory}")
        return step

    def close(self) -> None:
        """Waits for pending writes and releases threads."""
        self._manager.close()


def latest_step(directory: str | Path) -> int | None:
    """Step of the newest complete checkpoint in `directory`; None when there is none.

    Orbax writes into a directory with a suffix and renames it when it is complete.
    """
    path = Path(directory)
    steps = [int(d.name) for d in path.iterdir() if d.name.isdigit()] if path.is_dir() else []
    return max(steps, default=None)


def write_streamed(directory: str | Path, weights: Tree, config: str) -> None:
    """Writes weights as step 0 of a run, each block by block and never held as a whole.

    What is written is a checkpoint like those of `Checkpointer`, without an optimizer.

    Args:
      directory: the run's checkpoint directory; it must hold no step 0.
      weights: tree of `Streamed`.
      config: the resolved config as text, kept with the weights.

    Raises:
      CheckpointError: the directory cannot be written (no space, no permission).
      Exception: whatever reading a block raises; no checkpoint is left then.
    """
    directory = Path(directory).absolute()
    args = ocp.args.Composite(
        state=ocp.args.PyTreeSave({"params": weights}),
        data=ocp.args.JsonSave({}),
        config=ocp.args.JsonSave({"config": config}),
    )
    stream = StreamHandler()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _quiet(logging.CRITICAL), ocp.Checkpointer(_streaming_handler(stream)) as writer:
            writer.save(directory / "0", args=args)
    except (OSError, ValueError) as e:
        if isinstance(e, ValueError) and type(e) is not ValueError:
            raise  # Of whoever reads the blocks; tensorstore knows plain ValueErrors only.
        reason = str(e).rsplit(": ", 1)[-1] if "RESOURCE_EXHAUSTED" in str(e) else str(e)
        raise CheckpointError(f"cannot write weights to {directory}: {reason}") from e
    finally:
        stream.stop()  # Its thread must not go on after a Ctrl-C.


def _streaming_handler(stream: StreamHandler) -> ocp.CompositeCheckpointHandler:
    registry = ocp.type_handlers.create_type_handler_registry((Streamed, stream))
    return ocp.CompositeCheckpointHandler(
        state=ocp.PyTreeCheckpointHandler(type_handler_registry=registry),
        data=ocp.JsonCheckpointHandler(),
        config=ocp.JsonCheckpointHandler(),
    )


def stored_params(directory: str | Path, step: int | None = None) -> dict[str, Any]:
    """Shape and dtype of every weight in a run's newest (or given) checkpoint, by path.

    Args:
      directory: a run's directory, or its checkpoint directory.

    Raises:
      CheckpointError: no checkpoint there, or a damaged one.
    """
    item = _state_item(directory, step)
    with _reading(item.parent):
        tree = _metadata(item)["params"]
        return {
            name: jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype)
            for name, leaf in _named(tree).items()
        }


def stored_parts(directory: str | Path, step: int | None = None) -> frozenset[str]:
    """The parts of a model that a checkpoint has weights of: 'decoder', 'vision', ..."""
    return frozenset(name.split("/")[0] for name in stored_params(directory, step))


def restore_params(directory: str | Path, abstract: Tree, step: int | None = None) -> Tree:
    """The weights of a run's newest (or given) checkpoint, without its optimizer.

    Args:
      directory: a run's directory, or its checkpoint directory.
      abstract: what the weights must look like, from `params.abstract`.

    Raises:
      CheckpointError: no checkpoint there, or weights of another model (names, shapes listed).
    """
    item = _state_item(directory, step)
    stored = {
        name.removeprefix("params/"): shape
        for name, shape in _stored_shapes(item).items()
        if name.startswith("params/")
    }
    _check_same(item.parent, stored, _shapes(abstract))
    return _restore_some(item, abstract)


def restore_part(directory: str | Path, abstract: Tree, step: int | None = None) -> Tree:
    """Some of the weights of a checkpoint: those that `abstract` names; others are not read.

    Raises:
      CheckpointError: no checkpoint there, or it lacks some of these weights.
    """
    item = _state_item(directory, step)
    want, stored = _shapes({"params": abstract}), _stored_shapes(item)
    _check_same(item.parent, {k: v for k, v in stored.items() if k in want}, want)
    return _restore_some(item, abstract)


def _restore_some(item: Path, abstract: Tree) -> Tree:
    target = {"params": abstract}
    args = ocp.args.PyTreeRestore(
        target,
        restore_args=ocp.checkpoint_utils.construct_restore_args(target),
        partial_restore=True,
    )
    with _reading(item.parent), _quiet(), ocp.PyTreeCheckpointer() as reader:
        return reader.restore(item, args=args)["params"]


def _state_item(directory: str | Path, step: int | None) -> Path:
    """Where the train state of a run's checkpoint lies."""
    path = Path(directory).absolute()
    path = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    step = latest_step(path) if step is None else step
    if step is None:
        raise CheckpointError(f"no checkpoint in {path}")
    return path / str(step) / "state"


@contextlib.contextmanager
def _quiet(above: int = logging.ERROR) -> Iterator[None]:
    """Without Orbax's warning that a part read by itself lacks what its manager keeps elsewhere."""
    log = logging.getLogger("absl")
    level = log.level
    log.setLevel(above)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as e:  # What Orbax raises for damaged files is of no narrower class.
        reason = str(e).strip().splitlines()[0][:200]
        raise CheckpointError(f"cannot read checkpoint {path}: {reason}") from e


Shapes = dict[str, tuple[int, ...]]


def _shapes(tree: Tree) -> Shapes:
    """Shape of every leaf by its path, as in 'params/decoder/embed'."""
    return {name: tuple(leaf.shape) for name, leaf in _named(tree).items()}


def _named(tree: Tree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _stored_shapes(item: Path) -> Shapes:
    return _shapes(_metadata(item))


def _metadata(item: Path) -> Tree:
    # Asked first, because Orbax reports a missing item through the log and as None.
    if not (item / "_METADATA").is_file():
        raise CheckpointError(f"{item.parent}: no checkpoint, or a damaged one")
    with _reading(item.parent):
        return ocp.PyTreeCheckpointHandler().metadata(epath.Path(item)).tree


def _check_same(path: Path, have: Shapes, want: Shapes) -> None:
    problems = [f"{k}: missing" for k in want.keys() - have.keys()]
    problems += [f"{k}: unknown to this model" for k in have.keys() - want.keys()]
    problems += [
        f"{k}: shape {have[k]}, this model has {want[k]}"
        for k in want.keys() & have.keys()
        if have[k] != want[k]
    ]
    if problems:
        # Weights before the optimizer's copies of their names.
        problems.sort(key=lambda line: (line.startswith("opt_state"), line))
        shown = "; ".join(problems[:8])
        raise CheckpointError(
            f"{path} holds another model or stage, {len(problems)} differences: {shown}"
        )
