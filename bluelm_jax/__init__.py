"""BlueLM-V-3B in JAX: dynamic-resolution tiling, training on TPUs, export to TFLite.

    model = bluelm_jax.load("runs/quickstart/relaxed")
    print(model.generate("page.png", "Read."))

Modules are functions over plain parameter trees; see `vlm` for the model, `schemes` for the tiling
schemes, `train` for the training step, `api` for `load`. Nothing is imported until it is asked for, so
that data workers, which need NumPy alone, stay light.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_API = ("Model", "load")


def __getattr__(name: str) -> Any:
    if name in _API:
        return getattr(importlib.import_module("bluelm_jax.api"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
