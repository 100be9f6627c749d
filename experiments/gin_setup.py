"""Registers the library's config classes and presets with gin, for every experiment."""

from __future__ import annotations

import dataclasses
from typing import Any

from bluelm_jax import presets, sampling_config, serialize
from gin_configs import binding

PRESETS = (
    presets.siglip_so400m,
    presets.smollm2_135m,
    presets.tinyllama_1_1b,
    presets.vicuna_7b,
    presets.qwen2_0_5b,
    presets.qwen2_1_5b,
    presets.minicpm_2b,
    presets.bluelm_3b,
    presets.bluelm_v_minicpm_2b,
    presets.bluelm_v_3b,
)
for _cls in serialize.CLASSES.values():
    binding.register(_cls)
binding.register(sampling_config.SamplingConfig)
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
