"""Reference of what stands before the decoder: vision towers and projectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
import transformers
from torch import nn
from transformers.models.internvl import modeling_internvl
from transformers.models.llava_next import modeling_llava_next

from tests.parity import cases
from tests.parity.cases import Case
from tests.parity.torch_tools import Arrays, Run, fill, in_both_dtypes, record, to_numpy

# Vision towers -----------------------------------------------------------------------------------


def pixels(case: Case, seed: int, dtype: torch.dtype, size: int = 0) -> torch.Tensor:
    """[rows, 3, S, S]; rescaled and normalised as the image processors do."""
    values = torch.from_numpy(cases.tiles(case, seed, size)).float() * (1 / 255)
    return ((values - 0.5) / 0.5).permute(0, 3, 1, 2).to(dtype)


def siglip_inputs(case: Case, seed: int, dtype: torch.dtype) -> dict:
    """What SiglipVisionModel takes."""
    return {"pixel_values": pixels(case, seed, dtype)}


def siglip2_inputs(case: Case, seed: int, dtype: torch.dtype) -> dict:
    """What Siglip2VisionModel takes: flattened patches, none of them padding."""
    p = case.config["patch_size"]
    side = case.config["image_size"] // p
    image = pixels(case, seed, dtype)[:, :, : side * p, : side * p]
    patches = image.unfold(2, p, p).unfold(3, p, p)  # [rows, 3, side, side, p, p]
    return {
        "pixel_values": patches.permute(0, 2, 3, 4, 5, 1).reshape(case.rows, side**2, -1),
        "pixel_attention_mask": torch.ones(case.rows, side**2, dtype=torch.int64),
        "spatial_shapes": torch.full((case.rows, 2), side),
    }


def run_tower(model: Any, inputs: dict) -> Arrays:
    """Every block's output, and both features that a VLM may read."""
    store: dict[str, torch.Tensor] = {}
    undo = record(model.encoder.layers, store)
    store["last"] = model(**inputs).last_hidden_state
    undo()
    return to_numpy(store)


def vision(case: Case, seed: int) -> Run:
    """SigLIP, or SigLIP 2 with tiles of one fixed size."""
    second = case.family == "siglip2"
    config = dict(case.config, attn_implementation="eager")
    if second:
        config["num_patches"] = (config["image_size"] // config["patch_size"]) ** 2
        model = transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**config)).eval()
    else:
        model = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**config)).eval()
    shapes = fill(model, seed)
    inputs = siglip2_inputs if second else siglip_inputs
    out = run_tower(model, inputs(case, seed, torch.float32))
    facts = {"config": model.config.to_dict(), "shapes": shapes}
    if "resized" in case.extras:
        for size in case.config["image_size"] + np.array(cases.RESIZED):
            other = pixels(case, seed, torch.float32, int(size))
            found = model(pixel_values=other, interpolate_pos_encoding=True)
            out[f"resized.{size}"] = found.last_hidden_state.numpy()
    if "bfloat16" in case.extras:
        out |= in_both_dtypes(
            model, lambda m: run_tower(m, inputs(case, seed, next(m.parameters()).dtype))
        )
    return out, facts


# Projectors --------------------------------------------------------------------------------------


def text_and_vision(case: Case) -> dict[str, Any]:
    """The two sub-configs of a VLM's config; only their widths matter to what stands between."""
    return {
        "vision_config": transformers.SiglipVisionConfig(
            hidden_size=case.config["vision_width"], num_attention_heads=1
        ),
        "text_config": transformers.LlamaConfig(
            hidden_size=case.config["width"], num_attention_heads=1
        ),
    }


def llava_next(case: Case) -> tuple[nn.Module, Callable]:
    """LLaVA-NeXT's MLP."""
    mlp = modeling_llava_next.LlavaNextMultiModalProjector(
        transformers.LlavaNextConfig(**text_and_vision(case))
    )
    return mlp, mlp


def internvl(case: Case) -> tuple[nn.Module, Callable]:
    """InternVL's pixel shuffle, norm and MLP."""
    parts: dict[str, Any] = text_and_vision(case) | {
        "vision_config": transformers.InternVLVisionConfig(
            hidden_size=case.config["vision_width"], num_attention_heads=1
        )
    }
    config = transformers.InternVLConfig(**parts)
    mlp = modeling_internvl.InternVLMultiModalProjector(config)
    shuffle, side = modeling_internvl.InternVLModel.pixel_shuffle, case.config["side"]

    def call(x: torch.Tensor) -> torch.Tensor:
        maps = x.reshape(len(x), side, side, -1)
        blocks = shuffle(cast(Any, None), maps, scale_factor=config.downsample_ratio)
        return mlp(blocks.reshape(len(x), -1, blocks.shape[-1]))

    return mlp, call


def projector(case: Case, seed: int) -> Run:
    """What stands between tower and decoder."""
    mlp, call = {"llava_next": llava_next, "internvl": internvl}[case.family](case)
    shapes = fill(mlp, seed)
    out = {"image tokens": call(torch.from_numpy(cases.features(case, seed)))}
    return to_numpy(out), {"config": {}, "shapes": shapes}
