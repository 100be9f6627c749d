"""Ready-made models, each with the source of its numbers; keyword arguments replace fields.

"Its config" is the config.json beside the weights that are named. BlueLM-3B is unpublished: what is
assumed for it is said in `bluelm_3b`.
"""

from __future__ import annotations

from bluelm_jax.config import DecoderConfig, Dtype, VisionConfig, VLMConfig


def siglip_so400m(**overrides) -> VisionConfig:
    """SigLIP so400m/14 at 384 pixels (google/siglip-so400m-patch14-384, its config).

    Final-layer features, as in the paper; LLaVA-style models take `feature='penultimate'`. The same
    shape is google/siglip2-so400m-patch14-384, whose images were resized bilinearly
    (`Tiling.resample`).
    """
    return VisionConfig(**overrides)


def smollm2_135m(**overrides) -> DecoderConfig:
    """SmolLM2-135M (HuggingFaceTB/SmolLM2-135M-Instruct, its config): Llama with 3 key heads."""
    values = dict(
        vocab_size=49_152, width=576, depth=30, mlp_dim=1536, num_heads=9, num_kv_heads=3,
        head_dim=64, max_length=8192, rope_theta=1e5, norm_eps=1e-5, tied_head=True,
    )  # fmt: skip
    return DecoderConfig(**{**values, **overrides})


def tinyllama_1_1b(**overrides) -> DecoderConfig:
    """TinyLlama (TinyLlama/TinyLlama-1.1B-Chat-v1.0, its config): Llama 2 in small, 4 key heads."""
    values = dict(
        vocab_size=32_000, width=2048, depth=22, mlp_dim=5632, num_heads=32, num_kv_heads=4,
        head_dim=64, max_length=2048, norm_eps=1e-5,
    )  # fmt: skip
    return DecoderConfig(**{**values, **overrides})


def vicuna_7b(**overrides) -> DecoderConfig:
    """Vicuna 7B v1.5 (lmsys/vicuna-7b-v1.5, its config): Llama 2 7B, the LLM of LLaVA-1.5."""
    values = dict(
        vocab_size=32_000, width=4096, depth=32, mlp_dim=11_008, num_heads=32, num_kv_heads=32,
        head_dim=128, max_length=4096, norm_eps=1e-5,
    )  # fmt: skip
    return DecoderConfig(**{**values, **overrides})


def qwen2_0_5b(**overrides) -> DecoderConfig:
    """Qwen2 0.5B (Qwen/Qwen2-0.5B-Instruct, its config); Qwen2.5 0.5B has the same shape."""
    values = dict(
        vocab_size=151_936, width=896, depth=24, mlp_dim=4864, num_heads=14, num_kv_heads=2,
        head_dim=64, max_length=32_768, rope_theta=1e6, norm_eps=1e-6, tied_head=True,
        qkv_bias=True,
    )  # fmt: skip
    return DecoderConfig(**{**values, **overrides})


def qwen2_1_5b(**overrides) -> DecoderConfig:
    """Qwen2 1.5B (Qwen/Qwen2-1.5B-Instruct, its config); Qwen2.5 1.5B has the same shape."""
    values = dict(
        vocab_size=151_936, width=1536, depth=28, mlp_dim=8960, num_heads=12, num_kv_heads=2,
        head_dim=128, max_length=32_768, rope_theta=1e6, norm_eps=1e-6, tied_head=True,
        qkv_bias=True,
    )  # fmt: skip
    return DecoderConfig(**{**values, **overrides})


def minicpm_2b(**overrides) -> DecoderConfig:
    """MiniCPM-2B (openbmb/MiniCPM-2B-sft-bf16 config), the LLM of the paper's open ablation."""
    values = dict(
        vocab_size=122_753, width=2304, depth=40, mlp_dim=5760, num_heads=36, num_kv_heads=36,
        head_dim=64, max_length=4096, norm_eps=1e-5, tied_head=True, embed_scale=12.0,
        residual_scale=1.4 / 40**0.5, logit_divisor=2304 / 256,
    )  # fmt: skip
    return DecoderConfig(**{**values, **overrides})


def bluelm_3b(**overrides) -> DecoderConfig:
    """A 2.7B decoder in BlueLM's published 7B style. ASSUMED: BlueLM-3B's shape is unpublished.

    From the public BlueLM-7B: embedding LayerNorm, RMSNorm eps 1e-6, no linear biases, theta 1e4,
    vocabulary 100,096. Width, depth, heads and MLP width are guesses that give 2.73B parameters.
    """
    values = dict(
        vocab_size=100_096, width=2560, depth=32, mlp_dim=6656, num_heads=20, num_kv_heads=20,
        head_dim=128, max_length=4096, norm_eps=1e-6, tied_head=True, embed_norm=True,
    )  # fmt: skip
    return DecoderConfig(**{**values, **overrides})


def bluelm_v_minicpm_2b(dtype: Dtype = "bfloat16") -> VLMConfig:
    """SigLIP-400M + MiniCPM-2B: the model of the paper's ablation (table 2)."""
    return VLMConfig(vision=siglip_so400m(), decoder=minicpm_2b(), dtype=dtype)


def bluelm_v_3b(dtype: Dtype = "bfloat16") -> VLMConfig:
    """SigLIP-400M + the assumed BlueLM-3B decoder (see `bluelm_3b`)."""
    return VLMConfig(vision=siglip_so400m(), decoder=bluelm_3b(), dtype=dtype)


def tiny(**decoder_overrides) -> VLMConfig:
    """The smallest model with every part of the real one; for tests."""
    values = dict(
        vocab_size=280, width=32, depth=2, mlp_dim=64, num_heads=4, num_kv_heads=2, head_dim=8,
        max_length=512, remat=False,
    )  # fmt: skip
    return VLMConfig(
        vision=VisionConfig(
            tile_size=20, patch_size=4, width=24, depth=2, mlp_dim=48, num_heads=2, remat=False
        ),
        decoder=DecoderConfig(**{**values, **decoder_overrides}),
    )
