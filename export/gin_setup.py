"""Gin for the export commands: files and bindings in, a plain frozen dataclass out."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import gin
from gin import config as gin_internals

from export import config

T = TypeVar("T")
CLASSES = (config.ExportConfig, config.RunnerConfig)


class ConfigError(ValueError):
    """A gin file or binding that is wrong."""


def _configurable(cls: type) -> Callable[..., Any]:
    def build(**fields):
        return cls(**fields)

    build.__name__ = build.__qualname__ = cls.__name__
    build.__signature__ = inspect.signature(cls)  # type: ignore[attr-defined]
    return gin.external_configurable(  # type: ignore[return-value]
        build, name=cls.__name__, module="export"
    )


_BUILDERS: dict[type, Callable[..., Any]] = {cls: _configurable(cls) for cls in CLASSES}


def build(cls: type[T], files: Sequence[str], bindings: Sequence[str]) -> T:
    """The `cls` (ExportConfig or RunnerConfig) that gin files and bindings describe.

    Args:
      cls: the class to build.
      files: relative to the working directory or to the repository; later ones win.
      bindings: 'ExportConfig.cache_size = 256' strings, applied last.

    Raises:
      ConfigError: a missing file, an unknown name, a bad value, or a binding that nothing read.
    """
    gin.clear_config()
    repository = Path(__file__).resolve().parents[1]
    gin.add_config_file_search_path(str(repository))
    for name in files:
        if not any((Path(base) / name).is_file() for base in ("", repository)):
            raise ConfigError(f"--gin_file={name}: no such file (working directory {Path.cwd()})")
    try:
        gin.parse_config_files_and_bindings(
            list(files), list(bindings), print_includes_and_imports=False
        )
        result = _BUILDERS[cls]()
    except Exception as error:  # gin raises whatever the configured code raises
        raise ConfigError(f"{str(error).strip()}\n{_fields(cls)}") from error
    if unused := _unused():
        raise ConfigError(f"these bindings were read by nothing: {', '.join(unused)}")
    return result


def _fields(cls: type) -> str:
    names = ", ".join(field.name for field in dataclasses.fields(cls))
    return f"{cls.__name__} has the fields {names}"


def _unused() -> list[str]:
    # Gin keeps both tables but publishes only their text.
    used = gin_internals._OPERATIVE_CONFIG
    return sorted(
        f"%{scope}" if selector.endswith("macro") else f"{selector.rsplit('.', 1)[-1]}.{field}"
        for (scope, selector), fields in gin_internals._CONFIG.items()
        for field in fields
        if field not in used.get((scope, selector), {})
    )
