"""A run's folder: its config, and the weights that it holds."""

from __future__ import annotations

from pathlib import Path

from bluelm_jax import checkpoints, config, params, serialize, vlm
from bluelm_jax.params import Tree
from bluelm_jax.run_config import RunConfig


def load(directory: str | Path) -> tuple[RunConfig, Tree]:
    """Config and newest weights.

    Raises:
      ValueError: no such folder, no config.json, or what `load_weights` raises.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such directory")
    run = serialize.load_run_config(folder)
    return run, load_weights(folder, run.model)


def load_weights(directory: str | Path, model: config.VLMConfig) -> Tree:
    """The newest weights under `directory` (a run or its checkpoints directory), in float32.

    Of a run that was imported in part, for instance a language model alone, those parts.

    Raises:
      CheckpointError: no checkpoint, or weights of another model.
    """
    specs = vlm.specs(model)
    if (Path(directory) / "import.json").is_file():
        parts = checkpoints.stored_parts(directory)
        specs = {part: tree for part, tree in specs.items() if part in parts}
    return checkpoints.restore_params(directory, params.abstract(specs))
