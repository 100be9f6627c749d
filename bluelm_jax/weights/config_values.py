"""Values of a config.json by key, checked: whatever is wrong is named with key and value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bluelm_jax.weights.plan import WeightsError

Json = Mapping[str, Any]
# What plain RoPE may say of itself, and the values that leave it plain.
_PLAIN_ROPE = {
    "rope_type": ("default",), "type": ("default",), "factor": (1.0, None),
    "partial_rotary_factor": (1.0, None),
}  # fmt: skip


def need(cfg: Json, key: str) -> Any:
    """The value of a key that must be there."""
    if cfg.get(key) is None:
        raise WeightsError(f"config.json lacks {key!r}")
    return cfg[key]


def section(cfg: Json, key: str) -> Json:
    """The object under `key`; the whole config where the key is absent."""
    value = cfg.get(key, cfg)
    if not isinstance(value, Mapping):
        raise WeightsError(f"{key} = {value!r}: must be an object")
    return value


def whole(cfg: Json, key: str, default: int | None = None) -> int:
    """A whole number above 0; without `default` the key must be there."""
    value = need(cfg, key) if default is None else cfg.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise WeightsError(f"{key} = {value!r}: must be a whole number > 0")
    return value


def optional_whole(cfg: Json, key: str) -> int | None:
    """As `whole`; None where the key is absent, null or 0."""
    return None if cfg.get(key) in (None, 0) else whole(cfg, key)


def number(cfg: Json, key: str, default: float) -> float:
    """A finite number above 0."""
    value = cfg.get(key, default)
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    if not plain or not (math.isfinite(value) and value > 0):
        raise WeightsError(f"{key} = {value!r}: must be a number > 0")
    return float(value)


def flag(cfg: Json, key: str, default: bool) -> bool:
    """True or false; null is false, as Python code that reads the file takes it."""
    value = cfg.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise WeightsError(f"{key} = {value!r}: must be true or false")
    return bool(value)


def refuse(cfg: Json, key: str, default: Any, fine: tuple) -> None:
    """Raises WeightsError unless the value is one of `fine`."""
    value = cfg.get(key, default)
    if value not in fine:
        known = " or ".join(repr(v) for v in fine)
        raise WeightsError(f"{key} = {value!r} is not supported, only {known}")


def rope_theta(cfg: Json) -> float:
    """The base of plain RoPE, from whichever of its three places has it.

    Raises:
      WeightsError: any other RoPE, a key that is not known to leave it plain (a group of layers
        with its own RoPE among them), or places that disagree.
    """
    found = {"rope_theta": number(cfg, "rope_theta", 1.0)} if "rope_theta" in cfg else {}
    for key in ("rope_scaling", "rope_parameters"):
        value = cfg.get(key)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise WeightsError(f"{key} = {value!r}: must be an object or null")
        for name, inner in value.items():
            if name != "rope_theta" and inner not in _PLAIN_ROPE.get(name, ()):
                raise WeightsError(
                    f"{key} = {dict(value)!r} is not supported, only plain RoPE (because of {name!r})"
                )
        if "rope_theta" in value:
            try:
                found[f"{key}.rope_theta"] = number(value, "rope_theta", 1.0)
            except WeightsError as e:
                raise WeightsError(f"{key}: {e}") from e
    if len(set(found.values())) > 1:
        said = ", ".join(f"{key} = {value}" for key, value in found.items())
        raise WeightsError(f"{said}: they disagree; keep one")
    return next(iter(found.values()), 10_000.0)
