"""Hugging Face's config.json as our configs; what our arithmetic does not cover is refused.

Keys that cannot change the numbers of inference (dropout, caches, initialisers) are not looked at.
Defaults are those of the classes in transformers, which leave such keys out of the file.
"""

from __future__ import annotations

from typing import Any

from bluelm_jax.config import DecoderConfig, VisionConfig
from bluelm_jax.weights.config_values import (
    Json,
    flag,
    number,
    optional_whole,
    refuse,
    rope_theta,
    section,
    whole,
)
from bluelm_jax.weights.plan import WeightsError

# Model types that are read, and whether the head is tied where the file does not say.
DECODERS = {
    "llama": False, "mistral": False, "qwen2": False, "granite": False, "minicpm": True,
    "bluelm": False,
}  # fmt: skip
VISION = ("siglip_vision_model", "siglip2_vision_model")
_NESTED_VISION = ("siglip", "siglip2")
# Activations of vision towers by the name that transformers gives them.
ACTIVATIONS: dict[str, Any] = {"gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact"}


# Our own key, in the config.json of towers that we wrote: which features were read.
FEATURE_KEY = "bluelm_jax_feature"


def decoder_config(config_json: Json) -> DecoderConfig:
    """The decoder that a config.json describes; of a multimodal model, its language model.

    Raises:
      WeightsError: another model type, a missing key, a value of the wrong kind, or an option that
        is not supported; the message names key and value.
    """
    cfg = section(config_json, "text_config")
    kind = str(cfg.get("model_type", "")).lower()
    if kind not in DECODERS:
        raise WeightsError(f"model_type = {cfg.get('model_type')!r}: known are {list(DECODERS)}")
    _refuse_decoder(cfg, kind)
    heads, width = whole(cfg, "num_attention_heads"), whole(cfg, "hidden_size")
    kv_heads = optional_whole(cfg, "num_key_value_heads")
    head_dim = optional_whole(cfg, "head_dim")
    if kv_heads is None and kind in ("mistral", "qwen2"):
        kv_heads = whole(cfg, "num_key_value_heads")  # Their classes' defaults fit few models.
    if head_dim is None and width % heads:
        raise WeightsError(f"hidden_size = {width} is no multiple of num_attention_heads = {heads}")
    return DecoderConfig(
        vocab_size=whole(cfg, "vocab_size"), width=width, depth=whole(cfg, "num_hidden_layers"),
        mlp_dim=whole(cfg, "intermediate_size"), num_heads=heads, num_kv_heads=kv_heads or heads,
        head_dim=head_dim or width // heads,
        max_length=whole(cfg, "max_position_embeddings"), rope_theta=rope_theta(cfg),
        norm_eps=number(cfg, "rms_norm_eps", 1e-6),
        tied_head=flag(cfg, "tie_word_embeddings", DECODERS[kind]), qkv_bias=kind == "qwen2",
        embed_norm=kind == "bluelm" and flag(cfg, "use_stable_embedding", True),
        **_scales(cfg, kind, width),
    )  # fmt: skip


def vision_config(config_json: Json) -> VisionConfig:
    """The SigLIP tower that a config.json describes; of a model with text, its vision tower.

    Raises:
      WeightsError: as `decoder_config`.
    """
    cfg = section(config_json, "vision_config")
    kind = cfg.get("model_type")
    if "vision_config" in config_json and config_json.get("model_type") in _NESTED_VISION:
        kind = kind or f"{config_json['model_type']}_vision_model"
    if kind not in VISION:
        raise WeightsError(f"model_type = {kind!r}: known vision towers are {list(VISION)}")
    refuse(cfg, "hidden_act", "gelu_pytorch_tanh", tuple(ACTIVATIONS))
    refuse(cfg, "num_channels", 3, (3,))
    patch = whole(cfg, "patch_size", 16)
    if kind == "siglip2_vision_model":
        size = patch * _square_root(whole(cfg, "num_patches", 256))
    else:
        size = whole(cfg, "image_size", 224)
    refuse(cfg, FEATURE_KEY, "last", ("last", "penultimate"))
    feature = cfg.get(FEATURE_KEY, "last")
    depth = whole(cfg, "num_hidden_layers", 12) + (feature == "penultimate")
    return VisionConfig(
        tile_size=size, patch_size=patch, width=whole(cfg, "hidden_size", 768),
        depth=depth, feature=feature, mlp_dim=whole(cfg, "intermediate_size", 3072),
        num_heads=whole(cfg, "num_attention_heads", 12),
        norm_eps=number(cfg, "layer_norm_eps", 1e-6),
        activation=ACTIVATIONS[cfg.get("hidden_act", "gelu_pytorch_tanh")],
    )  # fmt: skip


def _refuse_decoder(cfg: Json, kind: str) -> None:
    refuse(cfg, "hidden_act", "silu", ("silu", "swish"))
    for key in ("attention_bias", "mlp_bias", "rope_interleaved"):
        refuse(cfg, key, False, (False, None))
    for key in ("quantization_config", "num_experts"):
        refuse(cfg, key, None, (None, 0))
    refuse(cfg, "partial_rotary_factor", 1.0, (1.0, None))
    _refuse_window(cfg, kind)


def _refuse_window(cfg: Json, kind: str) -> None:
    """Refuses attention windows shorter than the model's length."""
    stated = {"sliding_window": 4096} if kind == "mistral" else {}
    stated |= {k: v for k, v in cfg.items() if k == "sliding_window"}
    window = None if stated.get("sliding_window") is None else whole(stated, "sliding_window")
    if kind == "qwen2" and not flag(cfg, "use_sliding_window", False):
        window = None
    if window is not None and window < whole(cfg, "max_position_embeddings"):
        origin = "" if "sliding_window" in cfg else " (the default of this model type)"
        raise WeightsError(
            f"sliding_window = {window}{origin} is not supported: shorter than "
            f"max_position_embeddings = {cfg['max_position_embeddings']}; where prompts stay below "
            f"{window} tokens, set max_position_embeddings to {window} in config.json"
        )
    kinds = cfg.get("layer_types") or []
    if not isinstance(kinds, list):
        raise WeightsError(f"layer_types = {kinds!r}: must be a list")
    others = {str(kind) for kind in kinds} - {"full_attention", "sliding_attention"}
    if others:
        raise WeightsError(f"layer_types = {sorted(others)} is not supported, only full_attention")


def _scales(cfg: Json, kind: str, width: int) -> dict[str, Any]:
    """The three factors of MiniCPM, which granite spells in its own way."""
    if kind == "minicpm":
        depth = whole(cfg, "num_hidden_layers")
        return {
            "embed_scale": number(cfg, "scale_emb", 1),
            "residual_scale": number(cfg, "scale_depth", 1) / depth**0.5,
            "logit_divisor": width / number(cfg, "dim_model_base", 1),
        }
    if kind == "granite":
        head_dim = optional_whole(cfg, "head_dim") or width // whole(cfg, "num_attention_heads")
        scale = number(cfg, "attention_multiplier", 1.0)
        if abs(scale * head_dim**0.5 - 1) > 1e-6:
            raise WeightsError(
                f"attention_multiplier = {scale} is not supported, only head_dim ** -0.5 = "
                f"{head_dim**-0.5}"
            )
        return {
            "embed_scale": number(cfg, "embedding_multiplier", 1.0),
            "residual_scale": number(cfg, "residual_multiplier", 1.0),
            "logit_divisor": number(cfg, "logits_scaling", 1.0),
        }
    return {}


def _square_root(patches: int) -> int:
    side = round(patches**0.5)
    if side * side != patches:
        raise WeightsError(f"num_patches = {patches} is not supported, only squares")
    return side
