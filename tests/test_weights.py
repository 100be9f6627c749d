"""Names, configs and conversion between Hugging Face's layout and ours, in memory."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weights_helpers import BFLOAT16, LLM, TOWER, assert_same_bits, random_tensors

from bluelm_jax import config, decoder, presets, vision
from bluelm_jax.weights import WeightsError, convert, hf_config, hf_export, names
from bluelm_jax.weights.plan import make_plan

ALL_OPTIONS = dataclasses.replace(LLM, qkv_bias=True, embed_norm=True)
PENULTIMATE = dataclasses.replace(TOWER, feature="penultimate")
# As LlamaForCausalLM and SiglipModel save them: written out, so that a wrong table shows.
LLAMA_LAYER = {
    "input_layernorm.weight": (16,),
    "self_attn.q_proj.weight": (32, 16),
    "self_attn.k_proj.weight": (16, 16),
    "self_attn.v_proj.weight": (16, 16),
    "self_attn.o_proj.weight": (16, 32),
    "post_attention_layernorm.weight": (16,),
    "mlp.gate_proj.weight": (24, 16),
    "mlp.up_proj.weight": (24, 16),
    "mlp.down_proj.weight": (16, 24),
}
SIGLIP_LAYER = {
    "layer_norm1.weight": (24,),
    "layer_norm1.bias": (24,),
    "self_attn.q_proj.weight": (24, 24),
    "self_attn.q_proj.bias": (24,),
    "self_attn.k_proj.weight": (24, 24),
    "self_attn.k_proj.bias": (24,),
    "self_attn.v_proj.weight": (24, 24),
    "self_attn.v_proj.bias": (24,),
    "self_attn.out_proj.weight": (24, 24),
    "self_attn.out_proj.bias": (24,),
    "layer_norm2.weight": (24,),
    "layer_norm2.bias": (24,),
    "mlp.fc1.weight": (40, 24),
    "mlp.fc1.bias": (40,),
    "mlp.fc2.weight": (24, 40),
    "mlp.fc2.bias": (24,),
}


def shapes(tensors):
    return {name: x.shape for name, x in tensors.items()}


def layered(prefix, layer, depth=3):
    return {f"{prefix}.{i}.{name}": shape for i in range(depth) for name, shape in layer.items()}


def test_llama_names_and_shapes():
    assert shapes(random_tensors(names.decoder_part(LLM))) == {
        "model.embed_tokens.weight": (40, 16),
        **layered("model.layers", LLAMA_LAYER),
        "model.norm.weight": (16,),
        "lm_head.weight": (40, 16),
    }


def test_siglip_names_and_shapes():
    assert shapes(random_tensors(names.vision_part(TOWER))) == {
        "vision_model.embeddings.patch_embedding.weight": (24, 3, 4, 4),
        "vision_model.embeddings.patch_embedding.bias": (24,),
        "vision_model.embeddings.position_embedding.weight": (25, 24),
        **layered("vision_model.encoder.layers", SIGLIP_LAYER),
        "vision_model.post_layernorm.weight": (24,),
        "vision_model.post_layernorm.bias": (24,),
    }


@pytest.mark.parametrize(
    ("options", "more", "less"),
    [
        ({"tied_head": True}, set(), {"lm_head.weight"}),
        (
            {"qkv_bias": True},
            {f"model.layers.{i}.self_attn.{n}_proj.bias" for i in range(3) for n in "qkv"},
            set(),
        ),
        (
            {"embed_norm": True},
            {"model.embed_layer_norm.weight", "model.embed_layer_norm.bias"},
            set(),
        ),
    ],
)
def test_options_add_and_remove_tensors(options, more, less):
    plain = set(random_tensors(names.decoder_part(LLM)))
    cfg = dataclasses.replace(LLM, **options)
    assert set(random_tensors(names.decoder_part(cfg))) == (plain | more) - less


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
@pytest.mark.parametrize("cfg", [LLM, ALL_OPTIONS, TOWER, PENULTIMATE])
def test_round_trip_is_bit_exact(cfg, dtype):
    """Both ways, with not-a-number, infinities, negative zero and denormals among the values."""
    part = names.part_of(cfg)
    tensors = random_tensors(part, seed=3, dtype=dtype)
    first = next(iter(tensors.values())).reshape(-1)
    first[:5] = np.array([np.nan, np.inf, -np.inf, -0.0, 1e-7], dtype)
    tree = convert.load(part, tensors)
    assert_same_bits(convert.tensors_of(part, tree), tensors)


def test_linear_layers_are_transposed_and_stacked():
    tensors = random_tensors(names.decoder_part(LLM))
    tree = convert.load_decoder(tensors, LLM)
    q = tree["blocks"]["attn"]["q"]["kernel"]
    assert q.shape == (3, 16, 32)
    np.testing.assert_array_equal(q[1], tensors["model.layers.1.self_attn.q_proj.weight"].T)
    x = np.random.default_rng(0).normal(size=(2, 16)).astype(np.float32)
    theirs = x @ tensors["lm_head.weight"].T
    np.testing.assert_allclose(decoder.logits(tree, jnp.asarray(x), LLM), theirs, rtol=1e-5)


def test_patches_by_convolution_and_by_cutting():
    """NaFlex towers keep the patch kernel as a matrix over cut patches: row, column, colour."""
    tensors = random_tensors(names.vision_part(TOWER))
    tree = convert.load_vision(tensors, TOWER)
    name = "vision_model.embeddings.patch_embedding.weight"
    flat = {**tensors, name: tensors[name].transpose(0, 2, 3, 1).reshape(24, -1)}
    same = convert.load_vision(flat, TOWER)["patch"]["kernel"]
    np.testing.assert_array_equal(tree["patch"]["kernel"], same)
    pixels = np.random.default_rng(0).normal(size=(1, 20, 20, 3)).astype(np.float32)
    ours = vision.embed_patches(tree, jnp.asarray(pixels), TOWER)
    third = pixels[0, :4, 8:12].transpose(2, 0, 1)  # The third patch of the first row.
    theirs = np.einsum("ochw,chw->o", tensors[name], third)
    theirs += tensors[name.replace("weight", "bias")]
    theirs += tensors["vision_model.embeddings.position_embedding.weight"][2]
    np.testing.assert_allclose(ours[0, 2], theirs, rtol=2e-5, atol=2e-5)


SPELLINGS = {
    "bare decoder": ("decoder", [("model.", "")]),
    "llava, old": ("decoder", [("", "language_model.")]),
    "llava, new": ("decoder", [("model.", "model.language_model.")]),
    "bare tower": ("vision", [("vision_model.", "")]),
    "llava tower": ("vision", [("", "vision_tower.")]),
    "llava tower, 5": ("vision", [("vision_model.", "vision_tower.")]),
    "llava tower, new": ("vision", [("vision_model.", "model.vision_tower.")]),
}


def respelt(tensors, prefixes):
    for start, instead in prefixes:
        tensors = {
            instead + name.removeprefix(start) if name.startswith(start) else name: x
            for name, x in tensors.items()
        }
    return tensors


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling):
    which, prefixes = SPELLINGS[spelling]
    part = names.decoder_part(LLM) if which == "decoder" else names.vision_part(TOWER)
    tensors = random_tensors(part)
    others = {}
    if spelling.startswith("llava"):
        others = {
            "image_newline": np.zeros(3),
            "multi_modal_projector.linear_1.weight": np.zeros(3),
        }
    tree = convert.load(part, respelt(tensors, prefixes) | others)
    assert_same_bits(convert.tensors_of(part, tree), tensors)


def test_both_parts_of_one_multimodal_checkpoint():
    llm = random_tensors(names.decoder_part(LLM))
    tower = random_tensors(names.vision_part(TOWER))
    both = respelt(llm, [("", "language_model.")]) | respelt(tower, [("", "vision_tower.")])
    tree = convert.load_decoder(both, LLM)
    assert_same_bits(convert.decoder_tensors(tree, LLM), llm)
    tree = convert.load_vision(both, TOWER)
    assert_same_bits(convert.vision_tensors(tree, TOWER), tower)


def test_other_parts_are_strange_in_a_plain_checkpoint():
    tensors = random_tensors(names.decoder_part(LLM)) | {"vision_tower.x": np.zeros(2)}
    with pytest.raises(WeightsError, match=r"1 unknown: vision_tower\.x: unknown"):
        convert.load_decoder(tensors, LLM)


def test_known_tensors_that_are_left_out():
    tensors = random_tensors(names.decoder_part(LLM))
    tensors |= {"model.layers.2.self_attn.rotary_emb.inv_freq": np.zeros(4)}
    assert make_plan(names.decoder_part(LLM), shapes(tensors)).unused == (
        "model.layers.2.self_attn.rotary_emb.inv_freq",
    )
    tower = random_tensors(names.vision_part(TOWER))
    extra = ("vision_model.head.probe", "vision_model.embeddings.position_ids", "logit_scale")
    extra += ("text_model.final_layer_norm.bias",)
    tower |= dict.fromkeys(extra, np.zeros(1))
    assert set(make_plan(names.vision_part(TOWER), shapes(tower)).unused) == set(extra)


def test_a_tower_read_before_its_last_block_leaves_it_out():
    tensors = random_tensors(names.vision_part(TOWER))
    plan = make_plan(names.vision_part(PENULTIMATE), shapes(tensors))
    assert set(plan.unused) == {
        *(f"vision_model.encoder.layers.2.{name}" for name in SIGLIP_LAYER),
        "vision_model.post_layernorm.weight",
        "vision_model.post_layernorm.bias",
    }
    whole, cut = convert.load_vision(tensors, TOWER), convert.load_vision(tensors, PENULTIMATE)
    np.testing.assert_array_equal(
        whole["blocks"]["mlp"]["fc2"]["kernel"][:2], cut["blocks"]["mlp"]["fc2"]["kernel"]
    )


def test_missing_unknown_and_mis_shaped_are_listed_together():
    tensors = random_tensors(names.decoder_part(LLM))
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(8)
    tensors["lm_head.weight"] = np.zeros((16, 40))
    with pytest.raises(WeightsError) as caught:
        convert.load_decoder(tensors, LLM)
    text = str(caught.value)
    assert "2 missing, 1 unknown, 1 mis-shaped" in text
    for line in (
        "model.layers.1.mlp.up_proj.weight: missing",
        "model.norm.weight: missing",
        "model.layers.0.self_attn.q_norm.weight: unknown",
        "lm_head.weight: shape [16, 40], expected [40, 16]",
    ):
        assert line in text


def test_many_problems_are_counted_and_few_listed():
    with pytest.raises(WeightsError, match=r"27 unknown: .*; and 15 more") as caught:
        convert.load_decoder(
            random_tensors(names.decoder_part(dataclasses.replace(LLM, depth=6))), LLM
        )
    assert len(str(caught.value)) < 1000


def test_no_such_part_and_two_of_them():
    tower = random_tensors(names.vision_part(TOWER))
    with pytest.raises(WeightsError, match=r"no decoder: it has none of model\.embed_tokens"):
        convert.load_decoder(tower, LLM)
    with pytest.raises(WeightsError, match="two models in one"):
        convert.load_vision(tower | respelt(tower, [("vision_model.", "")]), TOWER)


def test_a_tied_head_may_be_there_and_must_be_equal():
    tied = dataclasses.replace(LLM, tied_head=True)
    tensors = random_tensors(names.decoder_part(tied))
    head = tensors["model.embed_tokens.weight"].copy()
    tree = convert.load_decoder(tensors | {"lm_head.weight": head}, tied)
    assert "head" not in tree
    head[3, 4] += 1
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from model\.embed_tokens"):
        convert.load_decoder(tensors | {"lm_head.weight": head}, tied)


def test_a_tree_of_another_model_is_refused():
    tree = convert.load_decoder(random_tensors(names.decoder_part(LLM)), LLM)
    with pytest.raises(WeightsError, match="embed_norm/bias"):
        convert.decoder_tensors(tree, ALL_OPTIONS)
    with pytest.raises(WeightsError, match=r"head: shape \(16, 40\), expected \(16, 41\)"):
        convert.decoder_tensors(tree, dataclasses.replace(LLM, vocab_size=41))


@given(st.data())
def test_any_decoder_round_trips(data):
    """Through names, shapes and config.json."""
    draw = data.draw
    kv, groups, head_dim = (
        draw(st.integers(1, 3)),
        draw(st.integers(1, 3)),
        draw(st.sampled_from([2, 6])),
    )
    flags = draw(
        st.sampled_from([{}, {"qkv_bias": True}, {"embed_norm": True}, {"embed_scale": 3.0}])
    )
    cfg = config.DecoderConfig(
        vocab_size=draw(st.integers(1, 9)), width=draw(st.integers(1, 9)),
        depth=draw(st.integers(1, 3)), mlp_dim=draw(st.integers(1, 9)), num_heads=kv * groups,
        num_kv_heads=kv, head_dim=head_dim, tied_head=draw(st.booleans()), **flags,
    )  # fmt: skip
    part = names.decoder_part(cfg)
    tensors = random_tensors(part, dtype=BFLOAT16)
    assert_same_bits(convert.tensors_of(part, convert.load(part, tensors)), tensors)
    assert hf_config.decoder_config(hf_export.decoder_json(cfg)) == cfg


def test_parameter_counts_of_the_full_models():
    def count(part):
        return sum(int(np.prod(p.shape)) for p in part.declared().values())

    assert count(names.decoder_part(presets.minicpm_2b())) == 2_724_880_896
    assert count(names.vision_part(presets.siglip_so400m())) == 412_987_248
