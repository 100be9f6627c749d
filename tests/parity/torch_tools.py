"""What the reference's families share: weights drawn, outputs recorded, both dtypes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

from tests.parity import cases

Arrays = dict[str, np.ndarray]
Run = tuple[Arrays, dict]  # Outputs, and the facts that our side needs to rebuild the weights.

# A fixed order of every sum: the stored references come out bit for bit the same on one machine.
torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)


def versions() -> dict[str, str]:
    """What made a reference."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def fill(model: Any, seed: int) -> dict[str, list[int]]:
    """Draws every weight by its checkpoint name; returns the shapes of those a checkpoint keeps."""
    shapes = {}
    tied = getattr(getattr(model, "config", None), "tie_word_embeddings", False)
    for name, value in model.state_dict().items():
        if tied and name == "lm_head.weight":  # The embedding table once more.
            continue
        shapes[name] = list(value.shape)
        value.copy_(torch.from_numpy(cases.draw(name, tuple(value.shape), seed)))
    return shapes


def record(modules, store: dict[str, torch.Tensor]) -> Callable[[], None]:
    """Stores what goes into the first of the modules and what comes out of each; returns an undo."""

    def entering(_, args, kwargs):
        store["embedded"] = args[0] if args else kwargs["hidden_states"]

    def leaving(i):
        def hook(_, args, out):
            store[f"layer.{i}"] = out[0] if isinstance(out, tuple) else out

        return hook

    handles = [modules[0].register_forward_pre_hook(entering, with_kwargs=True)]
    handles += [m.register_forward_hook(leaving(i)) for i, m in enumerate(modules)]

    def undo():
        for handle in handles:
            handle.remove()

    return undo


def to_numpy(tensors: dict[str, torch.Tensor], prefix: str = "") -> Arrays:
    """float32 copies; bfloat16 values keep their value."""
    return {prefix + k: v.detach().float().numpy().copy() for k, v in tensors.items()}


def rounded(model: Any) -> Any:
    """`model` with its weights rounded to bfloat16, still computing in float32."""
    for value in model.state_dict().values():
        if value.is_floating_point():
            value.copy_(value.bfloat16().float())
    return model


def in_both_dtypes(model: Any, call: Callable[[Any], Arrays]) -> Arrays:
    """Outputs of the bfloat16 model, and those that float32 arithmetic gives for its weights."""
    exact = call(rounded(model))
    coarse = call(model.to(torch.bfloat16))
    return {f"exact.{k}": v for k, v in exact.items()} | {
        f"coarse.{k}": v for k, v in coarse.items()
    }
