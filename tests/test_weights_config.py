"""config.json of other people's models: what is read, and what is refused with key and value."""

import dataclasses
import math
import re

import pytest
from weights_helpers import LLM, TOWER

from bluelm_jax import config, presets
from bluelm_jax.weights import WeightsError, hf_config, hf_export

LLAMA = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 3,
    "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
MISTRAL = LLAMA | {"model_type": "mistral"}
QWEN2 = LLAMA | {"model_type": "qwen2"}
GRANITE = LLAMA | {"model_type": "granite", "attention_multiplier": 8**-0.5}
# The public config of openbmb/MiniCPM-2B-sft-bf16, as far as it says what the model computes.
MINICPM = {
    "model_type": "minicpm", "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 5760,
    "max_position_embeddings": 4096, "num_attention_heads": 36, "num_hidden_layers": 40,
    "num_key_value_heads": 36, "rms_norm_eps": 1e-05, "rope_scaling": None, "vocab_size": 122753,
    "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4,
}  # fmt: skip
SO400M = {
    "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304,
    "num_hidden_layers": 27, "num_attention_heads": 16, "image_size": 384, "patch_size": 14,
}  # fmt: skip


def test_llama():
    assert hf_config.decoder_config(LLAMA) == LLM


@pytest.mark.parametrize(
    ("json", "changes"),
    [
        (LLAMA | {"tie_word_embeddings": True}, {"tied_head": True}),
        (LLAMA | {"rope_theta": 5e5}, {"rope_theta": 5e5}),
        (
            LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            {"rope_theta": 7.0},
        ),
        (
            LLAMA | {"rope_scaling": {"rope_type": "default", "rope_theta": 5e5}},
            {"rope_theta": 5e5},
        ),
        (
            LLAMA | {"rope_theta": 9.0, "rope_parameters": {"type": "default", "rope_theta": 9}},
            {"rope_theta": 9.0},
        ),
        (LLAMA | {"head_dim": None}, {"head_dim": 4}),
        (LLAMA | {"num_key_value_heads": None}, {"num_kv_heads": 4}),
        (MISTRAL | {"sliding_window": None}, {}),
        (MISTRAL | {"sliding_window": 64}, {}),
        (QWEN2 | {"sliding_window": 8, "use_sliding_window": False}, {"qkv_bias": True}),
        (
            GRANITE
            | {"embedding_multiplier": 12, "residual_multiplier": 0.2, "logits_scaling": 9.0},
            {"embed_scale": 12.0, "residual_scale": 0.2, "logit_divisor": 9.0},
        ),
        (LLAMA | {"model_type": "BlueLM", "use_stable_embedding": True}, {"embed_norm": True}),
        (LLAMA | {"model_type": "BlueLM", "use_stable_embedding": False}, {}),
    ],
)
def test_options(json, changes):
    assert hf_config.decoder_config(json) == dataclasses.replace(LLM, **changes)


def test_minicpm_is_the_preset():
    assert hf_config.decoder_config(MINICPM) == presets.minicpm_2b()


def test_siglip_is_the_preset():
    assert hf_config.vision_config(SO400M) == presets.siglip_so400m()
    nested = {"model_type": "siglip", "vision_config": SO400M, "text_config": {}}
    assert hf_config.vision_config(nested) == presets.siglip_so400m()


def test_siglip_defaults_are_those_of_its_class():
    """google/siglip-base-patch16-224 says no more than this."""
    json = {"model_type": "siglip", "vision_config": {"model_type": "siglip_vision_model"}}
    assert hf_config.vision_config(json) == config.VisionConfig(
        tile_size=224, patch_size=16, width=768, depth=12, mlp_dim=3072, num_heads=12
    )


def test_siglip_2():
    json = SO400M | {"model_type": "siglip2_vision_model", "num_patches": 256, "patch_size": 16}
    assert hf_config.vision_config(json).tile_size == 256
    with pytest.raises(WeightsError, match=r"num_patches = 200 is not supported, only squares"):
        hf_config.vision_config(json | {"num_patches": 200})


def test_parts_of_a_multimodal_model():
    json = {"model_type": "llava_next", "text_config": LLAMA, "vision_config": SO400M}
    assert hf_config.decoder_config(json) == LLM
    assert hf_config.vision_config(json) == presets.siglip_so400m()


@pytest.mark.parametrize(
    ("json", "message"),
    [
        (LLAMA | {"model_type": "gpt2"}, r"model_type = 'gpt2': known are \['llama'"),
        ({"vocab_size": 3}, r"model_type = None"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, r"lacks 'hidden_size'"),
        (LLAMA | {"hidden_act": "gelu"}, r"hidden_act = 'gelu' is not supported, only 'silu'"),
        (LLAMA | {"attention_bias": True}, r"attention_bias = True is not supported"),
        (LLAMA | {"mlp_bias": True}, r"mlp_bias = True is not supported"),
        (LLAMA | {"rope_interleaved": True}, r"rope_interleaved = True is not supported"),
        (LLAMA | {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        (LLAMA | {"quantization_config": {"bits": 4}}, r"quantization_config = \{'bits': 4\}"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, r"rope_scaling = \{'type'"),
        (
            LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}},
            r"rope_parameters = .*'llama3'.* is not supported, only plain RoPE",
        ),
        (LLAMA | {"head_dim": None, "hidden_size": 18}, r"hidden_size = 18 is no multiple of"),
        (MISTRAL | {"sliding_window": 32}, r"sliding_window = 32 is not supported: shorter than"),
        (
            MISTRAL | {"max_position_embeddings": 32768},
            r"sliding_window = 4096 \(the default of this model type\) is not supported",
        ),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 8}, r"sliding_window = 8"),
        (LLAMA | {"layer_types": ["linear_attention"]}, r"layer_types = \['linear_attention'\]"),
        (MISTRAL | {"num_key_value_heads": None}, r"lacks 'num_key_value_heads'"),
        (GRANITE | {"attention_multiplier": 0.5}, r"attention_multiplier = 0\.5 is not supported"),
        (MINICPM | {"num_experts": 8}, r"num_experts = 8 is not supported"),
        (
            LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            r"rope_parameters = .* only plain RoPE \(because of 'full_attention'\)",
        ),
        (LLAMA | {"rope_scaling": {"factor": 2.0}}, r"because of 'factor'"),
        (LLAMA | {"rope_scaling": {"mrope_section": [1, 2]}}, r"because of 'mrope_section'"),
        (
            LLAMA | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}},
            r"rope_theta = 10000\.0, rope_parameters\.rope_theta = 500000\.0: they disagree",
        ),
        (LLAMA | {"rope_scaling": {"rope_theta": None}}, r"rope_scaling: rope_theta = None: must"),
    ],
)
def test_what_our_arithmetic_does_not_cover_is_refused(json, message):
    with pytest.raises(WeightsError, match=message):
        hf_config.decoder_config(json)


@pytest.mark.parametrize(
    ("json", "message"),
    [
        ({"model_type": "clip_vision_model"}, r"model_type = 'clip_vision_model'"),
        (SO400M | {"hidden_act": "quick_gelu"}, r"hidden_act = 'quick_gelu' is not supported"),
        (SO400M | {"num_channels": 1}, r"num_channels = 1 is not supported, only 3"),
    ],
)
def test_other_towers_are_refused(json, message):
    with pytest.raises(WeightsError, match=message):
        hf_config.vision_config(json)


@pytest.mark.parametrize("kind", ["granite", "minicpm"])
def test_minicpm_goes_out_and_comes_back(kind):
    cfg = presets.minicpm_2b()
    json = hf_export.decoder_json(cfg, kind)
    assert hf_config.decoder_config(json) == cfg
    if kind == "minicpm":
        assert json["scale_depth"] == 1.4 and json["dim_model_base"] == 256
    else:
        assert math.isclose(json["residual_multiplier"], 1.4 / 40**0.5)


@pytest.mark.parametrize("feature", ["last", "penultimate"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_exact"])
def test_towers_go_out_and_come_back(feature, activation):
    cfg = dataclasses.replace(TOWER, feature=feature, activation=activation)
    json = hf_export.vision_json(cfg)
    assert json["num_hidden_layers"] == (3 if feature == "last" else 2)
    assert hf_config.vision_config(json) == cfg


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"qkv_bias": True}, "llama", "llama cannot express qkv_bias"),
        ({}, "qwen2", "qwen2 cannot express qkv_bias = False"),
        ({"embed_scale": 2.0, "embed_norm": True}, "auto", "bluelm cannot express embed_scale"),
        ({"qkv_bias": True, "logit_divisor": 2.0}, "auto", "granite cannot express qkv_bias"),
    ],
)
def test_a_decoder_that_no_class_can_express(options, kind, message):
    with pytest.raises(WeightsError, match=message):
        hf_export.decoder_json(dataclasses.replace(LLM, **options), kind)


@pytest.mark.parametrize(
    ("reader", "base", "key", "value"),
    [
        *(("decoder", LLAMA, "rope_theta", value) for value in (None, "1e4", 0, math.nan)),
        *(("decoder", LLAMA, "rope_scaling", value) for value in ("linear", [], 2.0)),
        *(("decoder", LLAMA, "hidden_size", value) for value in ("16", [16], 16.0, True, -16)),
        ("decoder", LLAMA, "rms_norm_eps", None),
        ("decoder", LLAMA, "rms_norm_eps", "1e-5"),
        ("decoder", LLAMA, "max_position_embeddings", 64.0),
        ("decoder", LLAMA, "num_key_value_heads", "2"),
        ("decoder", LLAMA, "head_dim", [8]),
        ("decoder", LLAMA, "tie_word_embeddings", "false"),
        ("decoder", LLAMA, "layer_types", 3),
        ("decoder", LLAMA, "sliding_window", "4096"),
        ("decoder", LLAMA, "text_config", None),
        ("decoder", MINICPM, "scale_depth", "1.4"),
        ("decoder", MINICPM, "dim_model_base", 0),
        ("decoder", GRANITE, "logits_scaling", None),
        ("vision", SO400M, "vision_config", None),
        ("vision", SO400M, "image_size", [384, 384]),
        ("vision", SO400M, "patch_size", None),
        ("vision", SO400M, "layer_norm_eps", None),
    ],
)
def test_values_of_the_wrong_kind_are_named(reader, base, key, value):
    read = {"decoder": hf_config.decoder_config, "vision": hf_config.vision_config}[reader]
    with pytest.raises(WeightsError, match=re.escape(f"{key} = {value!r}: must be ")) as caught:
        read(base | {key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scale", [0.123456789012345, 1 / 3, 0.9, 1.4 / 3**0.5])
def test_a_division_is_undone_to_the_bit_or_to_one_step(scale):
    cfg = dataclasses.replace(LLM, embed_scale=3.3, residual_scale=scale, logit_divisor=7.0)
    read = hf_config.decoder_config(hf_export.decoder_json(cfg, "minicpm"))
    for name in ("residual_scale", "logit_divisor"):
        found, wanted = getattr(read, name), getattr(cfg, name)
        assert abs(found - wanted) <= math.ulp(wanted), name
    assert read.embed_scale == 3.3
    assert hf_config.decoder_config(hf_export.decoder_json(cfg, "granite")) == cfg


def test_a_width_that_the_heads_do_not_divide_becomes_granite():
    cfg = dataclasses.replace(LLM, num_heads=6, num_kv_heads=3)
    json = hf_export.decoder_json(cfg)
    assert json["model_type"] == "granite" and hf_config.decoder_config(json) == cfg
    with pytest.raises(WeightsError, match="llama cannot express width = 16, no multiple of num_"):
        hf_export.decoder_json(cfg, "llama")
