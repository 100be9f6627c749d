"""Gin at the edge: config files and bindings in, plain frozen dataclasses out.

Shared by `experiments` and `export`, which register their classes. A config class is a configurable
under its own name, built by a plain function, so that the result is the class itself. Gin is finished
before anything is traced or a worker starts.

Gin alone says nothing about a binding that nobody reads (a misspelt scope or macro). `build` compares
what was bound with what was used and refuses the difference.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import tokenize
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import gin
from gin import config as gin_internals

ROOT = Path(__file__).resolve().parents[1]

# Gin would also look inside Python packages, and breaks on folders that are none, like gin_configs.
del gin_internals._FILE_READERS[1:]

# A file that describes one, for who gave none.
_EXAMPLES = {
    "RunConfig": "gin_configs/train/bluelm_v_stage1.gin",
    "Ablation": "gin_configs/ablations/reading_downsamplers.gin",
    "Quickstart": "gin_configs/quickstart.gin",
    "ExportConfig": "gin_configs/export/quickstart.gin",
}


class ConfigError(ValueError):
    """A gin file or binding that is wrong; the message says which and what would be right."""


T = TypeVar("T")
_BUILDERS: dict[type, Callable[[], Any]] = {}
_NAMES: set[str] = set()


def register_function(function: Callable[..., Any]) -> None:
    """Makes a function that returns a config (a preset) usable in gin files as `@its_name()`."""
    gin.external_configurable(function, module=function.__module__)
    _NAMES.add(function.__name__)


def register(cls: type[T]) -> type[T]:
    """Registers a dataclass with gin under its own name. Usable as a decorator."""

    def build(**fields):
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        _check_types(cls, fields)
        return cls(**fields)

    build.__name__ = build.__qualname__ = cls.__name__
    build.__doc__ = cls.__doc__
    build.__signature__ = inspect.signature(cls)  # type: ignore[attr-defined]
    _BUILDERS[cls] = gin.external_configurable(build, name=cls.__name__, module=cls.__module__)
    _NAMES.add(cls.__name__)
    return cls


def _check_types(cls: type, values: dict[str, Any]) -> None:
    """Raises ValueError for 1e3 where an integer is meant, 'plain' where a class is, and the like."""
    hints = typing.get_type_hints(cls)
    for name, value in values.items():
        wanted = _classes(hints.get(name, object))
        if isinstance(value, bool):
            fits = bool in wanted or object in wanted
        else:
            fits = isinstance(value, wanted) or (isinstance(value, int) and float in wanted)
        if fits:
            continue
        kinds = " or ".join(sorted(kind.__name__ for kind in wanted))
        hint = "; write @Name() with parentheses" if callable(value) else ""
        raise ValueError(f"{cls.__name__}.{name} = {value!r}: must be of type {kinds}{hint}")


def _classes(hint: Any) -> tuple[type, ...]:
    """The classes that an annotation admits; a Literal admits those of its values."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return tuple(kind for each in typing.get_args(hint) for kind in _classes(each))
    if origin is typing.Literal:
        return tuple({type(value) for value in typing.get_args(hint)})
    found = origin or hint
    return (found,) if isinstance(found, type) else (object,)


def build(
    root: type[T],
    files: Sequence[str],
    bindings: Sequence[str],
) -> T:
    """Parses files and bindings and builds the one object that they describe.

    Args:
      root: a registered class; bindings 'Root.field = ...' give its fields, and theirs.
      files: gin files, later ones win; relative to the working directory or to the repository.
      bindings: 'Name.field = value' strings, applied last.

    Returns:
      An instance of `root`.

    Raises:
      ConfigError: a missing file, an unknown name, a bad value, a missing value, or a binding that
        nothing used.
    """
    gin.clear_config()
    gin.add_config_file_search_path(str(ROOT))
    for name in files:
        if not any((Path(base) / name).is_file() for base in ("", ROOT)):
            raise ConfigError(f"--gin_file={name}: no such file (working directory {Path.cwd()})")
    try:
        gin.parse_config_files_and_bindings(
            list(files), list(bindings), print_includes_and_imports=False
        )
        result = _BUILDERS[root]()
    except Exception as e:  # gin raises whatever the configured code raises, with its own notes
        if not files and _lacks_values(e):
            raise ConfigError(_no_file(root, e, bindings)) from e
        raise ConfigError(_explain(e, bindings)) from e
    unused = unused_bindings()
    if unused:
        raise ConfigError(
            f"these bindings were read by nothing: {', '.join(unused)} (a misspelt scope or macro, a "
            f"part that this command does not build, or a field bound in scopes){_scoped(unused)}"
        )
    return result


def _explain(e: Exception, bindings: Sequence[str]) -> str:
    if isinstance(e, SyntaxError | tokenize.TokenError):
        name, line = getattr(e, "filename", None), getattr(e, "lineno", None)
        where = f"{name}, line {line}" if name else "--gin_bindings"
        return f"{where}: {e.args[0]} ({'; '.join(bindings)})"
    text = re.sub(r" \(<function \w+ at 0x\w+>\)", "", str(e).strip())
    if "No configurable matching" in text or "No configurable or" in text:
        known = sorted(_NAMES)
        wrong = text.split("'")[1].split("/")[-1] if "'" in text else ""
        close = difflib.get_close_matches(wrong, known, 3)
        text += f"\ndid you mean {' or '.join(close)}?" if close else f"\nknown: {', '.join(known)}"
    if "doesn't have a parameter named" in text:
        text += f"\n{_fields(text)}"
    if _lacks_values(e):
        text += "\nbind it in the gin file or with --gin_bindings"
    return text


def _lacks_values(e: Exception) -> bool:
    return isinstance(e, TypeError | RuntimeError) and "required" in str(e).lower()


def _no_file(root: type, e: Exception, bindings: Sequence[str]) -> str:
    """What to say of a config without a file that lacks values."""
    example = _EXAMPLES.get(root.__name__)
    such = f", such as --gin_file={example}" if example else ""
    rest = f"\nthe bindings alone leave out: {_explain(e, bindings)}" if bindings else ""
    return f"no --gin_file was given: name the file that describes the {root.__name__}{such}{rest}"


def _fields(text: str) -> str:
    """What the configurable named in gin's message does have."""
    wanted = text.split("'")[1]
    for cls in _BUILDERS:
        if cls.__name__ == wanted.rsplit(".", 1)[-1]:
            return f"{cls.__name__} has the fields " + ", ".join(
                field.name for field in dataclasses.fields(cls)
            )
    return ""


def unused_bindings() -> list[str]:
    """Bindings of the parsed config that no configurable has read, as 'scope/Name.field'."""
    # Gin keeps both tables but publishes only their text; a test holds this to its behaviour. A call
    # in scope a/b reads bindings of '', a and a/b; of several for one field, the innermost.
    read = {
        (_innermost(scope, selector, field), selector, field)
        for (scope, selector), fields in gin_internals._OPERATIVE_CONFIG.items()
        for field in fields
    }
    missing = []
    for (scope, selector), fields in gin_internals._CONFIG.items():
        name = selector.rsplit(".", 1)[-1]
        for field in fields:
            if (scope, selector, field) not in read:
                prefix = f"{scope}/" if scope else ""
                missing.append(f"%{scope}" if name == "macro" else f"{prefix}{name}.{field}")
    return sorted(missing)


def _scoped(unused: Sequence[str]) -> str:
    """The scoped bindings that stand in the way of unscoped ones, to name instead."""
    scoped = [
        f"{scope}/{name}"
        for (scope, selector), fields in gin_internals._CONFIG.items()
        for name in (f"{selector.rsplit('.', 1)[-1]}.{field}" for field in fields)
        if scope and name in unused
    ]
    return f"; bind {', '.join(sorted(scoped))}" if scoped else ""


def _innermost(scope: str, selector: str, field: str) -> str | None:
    """The scope whose binding a call in `scope` reads; None where the default applies."""
    parts = scope.split("/") if scope else []
    for count in range(len(parts), -1, -1):
        outer = "/".join(parts[:count])
        if field in gin_internals._CONFIG.get((outer, selector), {}):
            return outer
    return None


def resolved() -> str:
    """The configuration in effect, defaults included, as gin text."""
    return gin.operative_config_str()
