"""Hugging Face's config.json as our configs; what our arithmetic does not cover is refused.

Keys that cannot change the numbers of inference (dropout, caches, initialisers) are not looked at.
Defaults are those of the classes in transformers, which leave such keys out of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bluelm_jax.config import DecoderConfig, VisionConfig
from bluelm_jax.weights.plan import WeightsError

Json = Mapping[str, Any]
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
      WeightsError: another model type, a missing key, or an option that is not supported; the
        message names key and value.
    """
    cfg = config_json.get("text_config", config_json)
    kind = str(cfg.get("model_type", "")).lower()
    if kind not in DECODERS:
        raise WeightsError(f"model_type = {cfg.get('model_type')!r}: known are {list(DECODERS)}")
    _refuse_decoder(cfg, kind)
    heads, width = _need(cfg, "num_attention_heads"), _need(cfg, "hidden_size")
    kv_heads = cfg.get("num_key_value_heads")
    if kv_heads is None and kind in ("mistral", "qwen2"):
        kv_heads = _need(cfg, "num_key_value_heads")  # Their classes' defaults fit few models.
    if not cfg.get("head_dim") and width % heads:
        raise WeightsError(f"hidden_size = {width} is no multiple of num_attention_heads = {heads}")
    return DecoderConfig(
        vocab_size=_need(cfg, "vocab_size"), width=width, depth=_need(cfg, "num_hidden_layers"),
        mlp_dim=_need(cfg, "intermediate_size"), num_heads=heads, num_kv_heads=kv_heads or heads,
        head_dim=cfg.get("head_dim") or width // heads,
        max_length=_need(cfg, "max_position_embeddings"), rope_theta=_rope_theta(cfg),
        norm_eps=cfg.get("rms_norm_eps", 1e-6),
        tied_head=bool(cfg.get("tie_word_embeddings", DECODERS[kind])),
        qkv_bias=kind == "qwen2", embed_norm=kind == "bluelm" and _stable_embedding(cfg),
        **_scales(cfg, kind, width),
    )  # fmt: skip


def vision_config(config_json: Json) -> VisionConfig:
    """The SigLIP tower that a config.json describes; of a model with text, its vision tower.

    Raises:
      WeightsError: as `decoder_config`.
    """
    cfg = config_json.get("vision_config", config_json)
    kind = cfg.get("model_type")
    if "vision_config" in config_json and config_json.get("model_type") in _NESTED_VISION:
        kind = kind or f"{config_json['model_type']}_vision_model"
    if kind not in VISION:
        raise WeightsError(f"model_type = {kind!r}: known vision towers are {list(VISION)}")
    _refuse(cfg, "hidden_act", "gelu_pytorch_tanh", tuple(ACTIVATIONS))
    _refuse(cfg, "num_channels", 3, (3,))
    patch = cfg.get("patch_size", 16)
    size = cfg.get("image_size", 224)
    if kind == "siglip2_vision_model":
        size = patch * _square_root(cfg.get("num_patches", 256))
    feature = cfg.get(FEATURE_KEY, "last")
    depth = cfg.get("num_hidden_layers", 12) + (feature == "penultimate")
    return VisionConfig(
        tile_size=size, patch_size=patch, width=cfg.get("hidden_size", 768),
        depth=depth, feature=feature, mlp_dim=cfg.get("intermediate_size", 3072),
        num_heads=cfg.get("num_attention_heads", 12), norm_eps=cfg.get("layer_norm_eps", 1e-6),
        activation=ACTIVATIONS[cfg.get("hidden_act", "gelu_pytorch_tanh")],
    )  # fmt: skip


def _need(cfg: Json, key: str) -> Any:
    if cfg.get(key) is None:
        raise WeightsError(f"config.json lacks {key!r}")
    return cfg[key]


def _refuse(cfg: Json, key: str, default: Any, fine: tuple, why: str = "") -> None:
    value = cfg.get(key, default)
    if value not in fine:
        known = " or ".join(repr(v) for v in fine)
        raise WeightsError(f"{key} = {value!r} is not supported, only {known}{why}")


def _refuse_decoder(cfg: Json, kind: str) -> None:
    _refuse(cfg, "hidden_act", "silu", ("silu", "swish"))
    for key in ("attention_bias", "mlp_bias", "rope_interleaved"):
        _refuse(cfg, key, False, (False, None))
    for key in ("quantization_config", "num_experts"):
        _refuse(cfg, key, None, (None, 0))
    _refuse(cfg, "partial_rotary_factor", 1.0, (1.0, None))
    _refuse_rope(cfg)
    _refuse_window(cfg, kind)


def _refuse_rope(cfg: Json) -> None:
    """Refuses every kind of RoPE but the plain one, in the old key and the new."""
    for key in ("rope_scaling", "rope_parameters"):
        found = cfg.get(key) or {}
        kind = found.get("rope_type", found.get("type", "default"))
        if kind != "default" or found.get("factor", 1.0) != 1.0:
            raise WeightsError(f"{key} = {dict(found)!r} is not supported, only plain RoPE")
        _refuse(found, "partial_rotary_factor", 1.0, (1.0, None))


def _rope_theta(cfg: Json) -> float:
    inner = cfg.get("rope_parameters") or {}
    return float(inner.get("rope_theta", cfg.get("rope_theta", 10_000.0)))


def _refuse_window(cfg: Json, kind: str) -> None:
    """Refuses attention windows shorter than the model's length."""
    window = cfg.get("sliding_window", 4096 if kind == "mistral" else None)
    if kind == "qwen2" and not cfg.get("use_sliding_window", False):
        window = None
    if window is not None and window < _need(cfg, "max_position_embeddings"):
        stated = "" if "sliding_window" in cfg else " (the default of this model type)"
        raise WeightsError(
            f"sliding_window = {window}{stated} is not supported: shorter than "
            f"max_position_embeddings = {cfg['max_position_embeddings']}; where prompts stay below "
            f"{window} tokens, set max_position_embeddings to {window} in config.json"
        )
    kinds = set(cfg.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise WeightsError(f"layer_types = {sorted(kinds)} is not supported, only full_attention")


def _stable_embedding(cfg: Json) -> bool:
    return bool(cfg.get("use_stable_embedding", True))


def _scales(cfg: Json, kind: str, width: int) -> dict[str, Any]:
    """The three factors of MiniCPM, which granite spells in its own way."""
    if kind == "minicpm":
        depth = _need(cfg, "num_hidden_layers")
        return {
            "embed_scale": float(cfg.get("scale_emb", 1)),
            "residual_scale": cfg.get("scale_depth", 1) / depth**0.5,
            "logit_divisor": width / cfg.get("dim_model_base", 1),
        }
    if kind == "granite":
        heads = _need(cfg, "num_attention_heads")
        head_dim = cfg.get("head_dim") or width // heads
        scale = cfg.get("attention_multiplier", 1.0)
        if abs(scale * head_dim**0.5 - 1) > 1e-6:
            raise WeightsError(
                f"attention_multiplier = {scale} is not supported, only head_dim ** -0.5 = "
                f"{head_dim**-0.5}"
            )
        return {
            "embed_scale": float(cfg.get("embedding_multiplier", 1.0)),
            "residual_scale": float(cfg.get("residual_multiplier", 1.0)),
            "logit_divisor": float(cfg.get("logits_scaling", 1.0)),
        }
    return {}


def _square_root(patches: int) -> int:
    side = round(patches**0.5)
    if side * side != patches:
        raise WeightsError(f"num_patches = {patches} is not supported, only squares")
    return side
