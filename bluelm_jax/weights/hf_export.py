"""Our configs as config.json of transformers' classes; `hf_config` reads them back unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from bluelm_jax.config import DecoderConfig, VisionConfig
from bluelm_jax.weights.hf_config import ACTIVATIONS, FEATURE_KEY
from bluelm_jax.weights.plan import WeightsError

Kind = Literal["auto", "llama", "qwen2", "granite", "minicpm", "bluelm"]
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "bluelm": "BlueLMForCausalLM",
}


def decoder_kind(cfg: DecoderConfig) -> str:
    """The model type that has what this decoder uses, one of transformers' own where possible.

    MiniCPM's scaling becomes granite: the same arithmetic under other names, and a class that
    everybody has, where MiniCPM's own needs code from its repository. So does a width that is no
    multiple of the heads, which transformers' llama refuses even where head_dim is given.
    """
    scaled = (cfg.embed_scale, cfg.residual_scale, cfg.logit_divisor) != (1.0, 1.0, 1.0)
    if cfg.embed_norm:
        return "bluelm"
    if scaled:
        return "granite"
    if cfg.qkv_bias:
        return "qwen2"
    return "granite" if cfg.width % cfg.num_heads else "llama"


def decoder_json(cfg: DecoderConfig, kind: Kind = "auto", dtype: str = "float32") -> dict[str, Any]:
    """config.json of a decoder.

    Args:
      kind: model type to write; 'auto' takes `decoder_kind`.
      dtype: dtype of the weights, as the file names it.

    Raises:
      WeightsError: no model type, or not this one, has all that the decoder uses.
    """
    name = decoder_kind(cfg) if kind == "auto" else kind
    value = {
        "model_type": "BlueLM" if name == "bluelm" else name,
        "architectures": [_CLASSES[name]],
        "vocab_size": cfg.vocab_size,
        "hidden_size": cfg.width,
        "num_hidden_layers": cfg.depth,
        "intermediate_size": cfg.mlp_dim,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": cfg.max_length,
        "rms_norm_eps": cfg.norm_eps,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": cfg.tied_head,
        "attention_bias": False,
        "torch_dtype": dtype,
        **_extra(cfg, name),
    }
    _check(cfg, name)
    return value


def _extra(cfg: DecoderConfig, name: str) -> dict[str, Any]:
    match name:
        case "granite":
            return {
                "embedding_multiplier": cfg.embed_scale,
                "residual_multiplier": cfg.residual_scale,
                "attention_multiplier": cfg.head_dim**-0.5,
                "logits_scaling": cfg.logit_divisor,
            }
        case "minicpm":
            root, scale = cfg.depth**0.5, cfg.residual_scale
            base = cfg.width / cfg.logit_divisor
            return {
                "scale_emb": cfg.embed_scale,
                "scale_depth": _read_back(lambda x: x / root, scale * root, scale),
                "dim_model_base": _read_back(lambda x: cfg.width / x, base, cfg.logit_divisor),
            }
        case "qwen2":
            return {"use_sliding_window": False}
        case "bluelm":
            return {"use_stable_embedding": cfg.embed_norm}
    return {}


def _read_back(read: Callable[[float], float], near: float, wanted: float) -> float:
    """The number close to `near` that `read` turns into `wanted`, a short one where that works.

    A division does not reach every float; then it is `near`, one rounding step off.
    """
    steps = (math.nextafter(near, 0), math.nextafter(near, math.inf))
    return next((x for x in (round(near, 12), near, *steps) if x and read(x) == wanted), near)


def _check(cfg: DecoderConfig, name: str) -> None:
    """Raises WeightsError unless model type `name` can say all of `cfg`."""
    uses = {
        "qkv_bias": cfg.qkv_bias,
        "embed_norm": cfg.embed_norm,
        "embed_scale": cfg.embed_scale != 1,
        "residual_scale": cfg.residual_scale != 1,
        "logit_divisor": cfg.logit_divisor != 1,
    }
    scales = {"embed_scale", "residual_scale", "logit_divisor"}
    has = {
        "llama": set(), "qwen2": {"qkv_bias"}, "granite": scales, "minicpm": scales,
        "bluelm": {"embed_norm"},
    }[name]  # fmt: skip
    lacking = [option for option, used in uses.items() if used and option not in has]
    if name == "qwen2" and not cfg.qkv_bias:
        lacking.append("qkv_bias = False")
    if name == "llama" and cfg.width % cfg.num_heads:
        lacking.append(
            f"width = {cfg.width}, no multiple of num_heads = {cfg.num_heads} (granite can),"
        )
    if lacking:
        raise WeightsError(f"model type {name} cannot express {', '.join(lacking)} of this decoder")


def vision_json(cfg: VisionConfig, dtype: str = "float32") -> dict[str, Any]:
    """config.json of a tower as a `SiglipVisionModel` without its pooling head.

    A tower that is read before its last block is written without that block; its features are then
    the class's last hidden state before the final norm (`hidden_states[-1]`).
    """
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    if cfg.activation not in names:
        raise WeightsError(f"SigLIP has no activation {cfg.activation!r}: {sorted(names)}")
    return {
        "model_type": "siglip_vision_model",
        "architectures": ["SiglipVisionModel"],
        "hidden_size": cfg.width,
        "num_hidden_layers": cfg.num_blocks,
        "intermediate_size": cfg.mlp_dim,
        "num_attention_heads": cfg.num_heads,
        "num_channels": 3,
        "image_size": cfg.tile_size,
        "patch_size": cfg.patch_size,
        "layer_norm_eps": cfg.norm_eps,
        "hidden_act": names[cfg.activation],
        "attention_dropout": 0.0,
        "vision_use_head": False,
        "torch_dtype": dtype,
        FEATURE_KEY: cfg.feature,
    }


def dtype_name(dtypes: set[np.dtype]) -> str:
    """What config.json says of weights of these dtypes: the widest."""
    return max(dtypes, key=lambda dtype: dtype.itemsize).name
