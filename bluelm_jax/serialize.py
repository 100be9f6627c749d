"""Config dataclasses to JSON and back, so that a run directory tells what made it.

Each object is written with its class name, which is how a union (`Relaxed | LlavaNext | ...`)
comes back as the same member. Only the project's own config classes are ever built.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from bluelm_jax import config, data_config, run_config, schemes

_MODULES = (config, data_config, run_config, schemes)
CLASSES: dict[str, type] = {
    value.__name__: value
    for module in _MODULES
    for value in vars(module).values()
    if isinstance(value, type) and dataclasses.is_dataclass(value)
}


def to_plain(value: Any) -> Any:
    """Dataclasses to dicts with a "class" entry, tuples to lists."""
    if dataclasses.is_dataclass(value):
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [to_plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{value!r} of {type(value).__name__} cannot stand in a config")


def from_plain(value: Any) -> Any:
    """Inverse of `to_plain`; lists become tuples.

    Raises:
      ValueError: an unknown class, or fields that its class does not have.
    """
    if isinstance(value, list):
        return tuple(from_plain(v) for v in value)
    if not isinstance(value, dict):
        return value
    fields = {k: from_plain(v) for k, v in value.items() if k != "class"}
    name = value.get("class")
    if not isinstance(name, str) or name not in CLASSES:
        raise ValueError(f"config class {name!r} is unknown; known: {sorted(CLASSES)}")
    try:
        return CLASSES[name](**fields)
    except TypeError as e:
        raise ValueError(f"config of class {name} does not fit this version: {e}") from e


def to_json(value: Any) -> str:
    """A config as indented JSON."""
    return json.dumps(to_plain(value), indent=2) + "\n"


def from_json(text: str) -> Any:
    """The config written by `to_json`."""
    return from_plain(json.loads(text))


def load_run_config(path: str | Path) -> run_config.RunConfig:
    """Reads `config.json` of a run, or of the run directory given.

    A tokenizer named without a folder is the file of that name in the run's directory, if there.

    Raises:
      ValueError: the file is missing or holds something else; the message names it.
    """
    path = Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path}: no such file; a run directory holds a config.json")
    try:
        run = from_json(path.read_text())
    except (ValueError, json.JSONDecodeError) as e:
        raise ValueError(f"{path}: {e}") from e
    if not isinstance(run, run_config.RunConfig):
        raise ValueError(f"{path}: holds a {type(run).__name__}, not a RunConfig")
    return _with_own_tokenizer(run, path.parent)


def _with_own_tokenizer(run: run_config.RunConfig, folder: Path) -> run_config.RunConfig:
    """The run with the path of a tokenizer that lies beside its config.json."""
    choice = run.data.tokenizer
    if isinstance(choice, data_config.ByteTokens) or Path(choice.path).name != choice.path:
        return run
    if not (folder / choice.path).is_file():
        return run
    choice = dataclasses.replace(choice, path=str(folder / choice.path))
    return dataclasses.replace(run, data=dataclasses.replace(run.data, tokenizer=choice))
