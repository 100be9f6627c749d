"""The exported form of the model equals the model, in JAX, before anything is lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bluelm_jax import decoder, layers, layout, vlm
from bluelm_jax.config import DecoderConfig, ProjectorConfig, VilaConcat, VisionConfig, VLMConfig
from export import build, decoder_graphs, graphs, quantize
from export.check import random_weights, tiny_model
from export.config import ExportConfig
from export.kv_cache import MASKED, KVCache, attention_mask, rope_tables
from export.signatures import Model

FLOAT = jnp.dtype("float32")
EXPORT = ExportConfig(cache_size=32, prefill_chunk=8, tile_batch=4)
OPTIONS = {
    "plain": {},
    "biases and norm": {"qkv_bias": True, "embed_norm": True},
    "tied and scaled": {
        "tied_head": True, "embed_scale": 12.0, "residual_scale": 0.4, "logit_divisor": 4.0,
    },
    "one key head": {"num_kv_heads": 1},
    "odd sizes": {"width": 20, "mlp_dim": 36, "num_heads": 3, "num_kv_heads": 3, "head_dim": 6},
}  # fmt: skip


def models(p, cfg, ex=EXPORT):
    return {model.name: model for model in graphs.build(p, cfg, ex)}


def signatures(model: Model):
    """signature name -> function of inputs, which have to be those the signature declares."""
    weights = jax.tree.map(jnp.asarray, model.weights)

    def one(signature):
        # Not jitted: single operations compile once for all layers and options of a shape.
        declared = {name: struct.shape for name, struct in signature.inputs.items()}

        def call(**inputs):
            assert {name: value.shape for name, value in inputs.items()} == declared
            return signature.fn(weights, **{k: jnp.asarray(v) for k, v in inputs.items()})

        return call

    return {signature.name: one(signature) for signature in model.signatures}


def run(model: Model, signature: str, **inputs):
    return signatures(model)[signature](**inputs)


def decoder_calls(p, cfg):
    return signatures(models(p, cfg)["decoder"])


def exported_logits(calls, cfg, x, chunks):
    """Logits after the last of [L, D] embeddings, by the exported graphs and a NumPy cache.

    `chunks` lists (signature, positions that count); prefill calls are padded with noise.
    """
    cache = KVCache(build.shapes(cfg, EXPORT))
    rng, at, outputs = np.random.default_rng(3), 0, {}
    for signature, count in chunks:
        length = 1 if signature == "decode" else EXPORT.prefill_chunk
        piece = rng.normal(size=(length, x.shape[1])).astype(np.float32)
        piece[:count] = x[at : at + count]
        cos, sin = rope_tables(at, length, cfg.decoder.head_dim, cfg.decoder.rope_theta)
        outputs = calls[signature](
            embeddings=piece[None],
            mask=attention_mask(at, EXPORT.cache_size, length),
            pos_emb_cos=cos,
            pos_emb_sin=sin,
            **cache.inputs(),
        )
        cache.append({k: np.asarray(v) for k, v in outputs.items()}, count)
        at += count
    assert at == len(x) == cache.length
    return np.asarray(outputs["logits"][0, 0])


@pytest.mark.parametrize("name", OPTIONS)
def test_decoder_equals_extend(name):
    p, cfg = tiny_model(**OPTIONS[name])
    tokens = np.random.default_rng(0).integers(0, cfg.decoder.vocab_size, 14)
    x = decoder.embed_tokens(p["decoder"], jnp.asarray(tokens)[None], cfg.decoder, FLOAT)
    cache = decoder.init_cache(cfg.decoder, 1, 14, FLOAT)
    hidden, cache = decoder.extend(p["decoder"], x, jnp.array([14]), cache, cfg.decoder)
    want = decoder.logits(p["decoder"], hidden[0, -1], cfg.decoder)
    # A full chunk, a partly filled one, then one token at a time.
    chunks = [("prefill_8", 8), ("prefill_8", 4), ("decode", 1), ("decode", 1)]
    calls = decoder_calls(p, cfg)
    got = exported_logits(calls, cfg, np.asarray(x[0]), chunks)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    alone = exported_logits(calls, cfg, np.asarray(x[0]), [("decode", 1)] * 14)
    np.testing.assert_allclose(alone, want, rtol=1e-4, atol=1e-4)


def test_padding_of_a_chunk_changes_nothing():
    p, cfg = tiny_model()
    x = np.random.default_rng(1).normal(size=(6, cfg.decoder.width)).astype(np.float32)
    splits = (
        [("prefill_8", 5), ("decode", 1)],
        [("prefill_8", 2), ("prefill_8", 3), ("decode", 1)],
    )
    calls = decoder_calls(p, cfg)
    one, two = (exported_logits(calls, cfg, x, chunks) for chunks in splits)
    np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "biases and norm", "tied and scaled"])
def test_embedder_equals_embed_tokens(name):
    p, cfg = tiny_model(**OPTIONS[name])
    ids = np.random.default_rng(0).integers(0, cfg.decoder.vocab_size, (1, 8)).astype(np.int32)
    got = run(models(p, cfg)["embedder"], "prefill_8", token_ids=ids)["embeddings"]
    want = decoder.embed_tokens(p["decoder"], jnp.asarray(ids), cfg.decoder, FLOAT)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("feature", "tile_size", "factor", "depth"),
    [("last", 20, 2, 2), ("penultimate", 20, 2, 2), ("last", 22, 2, 1), ("last", 24, 3, 3)],
)
def test_vision_graphs_equal_encode_tiles(feature, tile_size, factor, depth):
    # 20 and 22 pixels are 5 patches (an odd side, padded; 2 pixels dropped), 24 are 6.
    cfg = VLMConfig(
        vision=VisionConfig(
            tile_size=tile_size, patch_size=4, width=24, depth=2, mlp_dim=40, num_heads=3,
            feature=feature,
        ),
        decoder=DecoderConfig(
            vocab_size=16, width=20, depth=1, mlp_dim=8, num_heads=2, num_kv_heads=2, head_dim=4
        ),
        downsampler=VilaConcat(factor=factor),
        projector=ProjectorConfig(depth=depth),
    )  # fmt: skip
    p = jax.tree.map(jnp.asarray, random_weights(cfg))
    tiles = np.random.default_rng(0).integers(0, 256, (4, tile_size, tile_size, 3)).astype(np.uint8)
    built = models(p, cfg)
    x = run(built["patch_embed"], "patch_embed", tiles=tiles)["patches"]
    x = run(built["vit"], "vit", patches=x)["features"]
    got = run(built["projector"], "projector", features=x)["image_tokens"]
    want = vlm.encode_tiles(p, jnp.asarray(tiles), cfg)
    assert got.shape == want.shape == (4, layout.token_side(cfg) ** 2, 20)
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_numpy_rope_equals_the_model_s():
    cos, sin = rope_tables(5, 7, 8, 10_000.0)
    want = layers.rope_tables(jnp.arange(5, 12)[None], 8, 10_000.0)
    np.testing.assert_allclose(cos[:, :, 0], want[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sin[:, :, 0], want[1], rtol=1e-6, atol=1e-6)


def test_attention_mask_literal():
    m = MASKED
    want = [[0, 0, m, 0, m], [0, 0, m, 0, 0]]
    np.testing.assert_array_equal(attention_mask(2, 3, 2)[0, 0], want)


def test_cache_longer_than_the_model_is_refused():
    p, cfg = tiny_model(max_length=16)
    with pytest.raises(ValueError, match="cache_size = 32: must be <= max_length = 16"):
        graphs.build(p, cfg, EXPORT)


@pytest.mark.parametrize(
    ("requested", "width", "block"),
    [(32, 96, 32), (64, 96, 32), (128, 256, 128), (256, 128, 128), (32, 80, 0), (0, 96, 0)],
)
def test_block_size(requested, width, block):
    assert quantize.block_size(requested, width) == block


def test_round_weight_literal():
    weight = np.array([[7.0, 3.4, -3.6, 0.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    want = [[7.0, 3.0, -4.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    np.testing.assert_allclose(quantize.round_weight(weight, "int4", 0), want)
    halves = quantize.round_weight(np.array([[7.0, 1.4, 70.0, 14.0]], np.float32), "int4", 2)
    np.testing.assert_allclose(halves, [[7.0, 1.0, 70.0, 10.0]])


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("cache_size", 0, "> 0"),
        ("prefill_chunk", 4096, "<= cache_size = 2048"),
        ("decoder_precision", "int2", "'float', 'int8' or 'int4'"),
        ("vision_precision", "int4", "'float' or 'int8'"),
        ("decoder_block_size", 48, "one of"),
    ],
)
def test_config_errors_name_value_and_bound(field, value, bound):
    with pytest.raises(ValueError, match=f"ExportConfig.{field} = {value!r}: must be {bound}"):
        ExportConfig(**{field: value})


def test_decoder_step_takes_every_cache_tensor():
    _, cfg = tiny_model()
    inputs = decoder_graphs.decoder_inputs(cfg.decoder, 8, 32)
    assert inputs["kv_cache_k_1"].shape == (1, 2, 32, 8)
    assert inputs["kv_cache_v_1"].shape == (1, 2, 8, 32)
    assert inputs["mask"].shape == (1, 1, 8, 40)
    assert max(len(s.shape) for s in inputs.values()) == 4
