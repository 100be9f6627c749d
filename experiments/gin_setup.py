"""Registers the library's config classes and presets with gin, for every experiment."""

from __future__ import annotations

import dataclasses
from typing import Any

from bluelm_jax import config, serialize
from gin_configs import binding

PRESETS = (
    config.siglip_so400m,
    config.minicpm_2b,
    config.bluelm_3b,
    config.bluelm_v_minicpm_2b,
    config.bluelm_v_3b,
)
for _cls in serialize.CLASSES.values():
    binding.register(_cls)
for _preset in PRESETS:
    binding.register_function(_preset)


def describe(value: Any, indent: int = 0) -> str:
    """A config as an indented outline, one field a line."""
    lines = []
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            lines.append(f"{'  ' * indent}{field.name}: {type(inner).__name__}")
            lines.append(describe(inner, indent + 1))
        else:
            lines.append(f"{'  ' * indent}{field.name} = {inner!r}")
    return "\n".join(line for line in lines if line)
