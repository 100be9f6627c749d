"""Sizes of the presets, held against the references they name."""

import pytest

from bluelm_jax import decoder, layout, params, presets, vision, vlm
from bluelm_jax.run_config import RunConfig
from experiments import gin_setup
from gin_configs import binding

# Parameters of transformers' classes in the same shapes, as `python -m tests.parity.preset_counts`
# prints them (transformers 5.24). SmolLM2's is also the sum of its published tensors, and 494,032,768
# and 1,543,714,304 are what Qwen's model cards state as 0.49B and 1.54B.
REFERENCE = {
    "siglip_so400m": 412_987_248,  # SiglipVisionModel without its pooling head
    "smollm2_135m": 134_515_008,
    "tinyllama_1_1b": 1_100_048_384,
    "vicuna_7b": 6_738_415_616,
    "qwen2_0_5b": 494_032_768,
    "qwen2_1_5b": 1_543_714_304,
    "minicpm_2b": 2_724_880_896,  # GraniteForCausalLM: MiniCPM has no class of its own
    "bluelm_3b": 2_731_051_520 + 2 * 2560,  # LlamaForCausalLM and the LayerNorm after the embedding
}
POOLING_HEAD = 428_225_600 - 412_987_248  # the same class with and without it


def count(cfg):
    module = vision if hasattr(cfg, "patch_size") else decoder
    return params.count(module.specs(cfg))


def test_parameters_equal_the_references(capsys):
    found = {name: count(getattr(presets, name)()) for name in REFERENCE}
    with capsys.disabled():
        print()
        for name, number in found.items():
            print(f"  {name:<16}{number:>16,}   reference {REFERENCE[name]:>16,}")
    assert found == REFERENCE


def test_every_decoder_and_tower_preset_has_a_reference():
    parts = {preset.__name__ for preset in gin_setup.PRESETS} - {
        "bluelm_v_minicpm_2b", "bluelm_v_3b",
    }  # fmt: skip
    assert parts == set(REFERENCE)


def decoder_count(v, d, layers, m, heads, kv, h, *, tied, qkv_bias=False):
    attention = d * heads * h + 2 * d * kv * h + heads * h * d
    attention += qkv_bias * (heads + 2 * kv) * h
    block = attention + 3 * d * m + 2 * d
    return v * d * (1 if tied else 2) + layers * block + d


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        ("minicpm_2b", decoder_count(122_753, 2304, 40, 5760, 36, 36, 64, tied=True)),
        ("smollm2_135m", decoder_count(49_152, 576, 30, 1536, 9, 3, 64, tied=True)),
        ("vicuna_7b", decoder_count(32_000, 4096, 32, 11_008, 32, 32, 128, tied=False)),
        ("qwen2_0_5b", decoder_count(151_936, 896, 24, 4864, 14, 2, 64, tied=True, qkv_bias=True)),
    ],
)
def test_counts_by_formula(name, by_hand):
    assert by_hand == count(getattr(presets, name)()) == REFERENCE[name]


def test_siglip_tower_by_formula():
    d, m, layers = 1152, 4304, 27
    block = 4 * (d * d + d) + (d * m + m) + (m * d + d) + 2 * 2 * d
    tower = 14 * 14 * 3 * d + d + 27 * 27 * d + layers * block + 2 * d
    assert tower == REFERENCE["siglip_so400m"]
    # Probe, attention with its projections, norm and MLP.
    assert d + 4 * (d * d + d) + 2 * d + (d * m + m) + (m * d + d) == POOLING_HEAD
    # Features before the last block need neither that block nor the final norm.
    before = presets.siglip_so400m(feature="penultimate")
    assert count(before) == tower - block - 2 * d and before.num_blocks == 26


def test_bluelm_3b_is_about_2_7_billion():
    assert 2.72e9 < count(presets.bluelm_3b()) < 2.74e9


def test_whole_presets_join_the_parts():
    cfg = presets.bluelm_v_minicpm_2b()
    fuse = 4 * 1152 * 1152 + 1152
    projector = 1152 * 2304 + 2304 + 2304 * 2304 + 2304
    assert params.count(vlm.specs(cfg)) == 412_987_248 + fuse + projector + 2_724_880_896
    assert cfg.dtype == "bfloat16" and layout.token_side(cfg) == 14
    bluelm = presets.bluelm_v_3b()
    assert bluelm.decoder.embed_norm and not bluelm.decoder.qkv_bias


def test_presets_take_overrides():
    assert presets.minicpm_2b(depth=2).depth == 2
    assert presets.minicpm_2b().residual_scale == pytest.approx(1.4 / 40**0.5)
    with pytest.raises(TypeError, match="dept"):
        presets.minicpm_2b(dept=2)


def test_presets_are_known_to_gin():
    files = ["gin_configs/train/bluelm_v_stage1.gin"]
    bindings = [
        "SourceConfig.path = 'data.json'",
        "VLMConfig.decoder = @qwen2_0_5b()",
        "siglip_so400m.feature = 'penultimate'",
    ]
    model = binding.build(RunConfig, files, bindings).model
    assert model.decoder == presets.qwen2_0_5b() and model.vision.num_blocks == 26
