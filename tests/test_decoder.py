"""The decoder: causality, packing, the KV cache, and each option by its formula."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, assert_trees_close, draw

from bluelm_jax import decoder, layers

CFG = TINY.decoder
P = draw(decoder.specs(CFG))
LENGTH = 10


def inputs(rows=2, length=LENGTH, seed=0):
    return jax.random.normal(jax.random.key(seed), (rows, length, 32))


def plain(x):
    """Positions and segments of rows that hold one sample each."""
    rows, length, _ = x.shape
    positions = jnp.tile(jnp.arange(length), (rows, 1))
    return positions, jnp.ones((rows, length), jnp.int32)


forward = jax.jit(decoder.forward, static_argnames="cfg")
extend = jax.jit(decoder.extend, static_argnames="cfg")


@pytest.fixture(scope="module")
def whole():
    """Hidden states of two rows of LENGTH, each one sample."""
    return np.asarray(forward(P, inputs(), *plain(inputs()), cfg=CFG))


# Causality and packing -------------------------------------------------------------------------------


def test_causality_by_gradient():
    x = inputs(1)

    @jax.jit
    @jax.grad
    def grad(x, at):
        return jnp.square(decoder.forward(P, x, *plain(x), CFG)[0, at]).sum()

    for at in (0, 4, LENGTH - 1):
        reached = np.abs(np.asarray(grad(x, at)[0])).max(-1) > 0
        assert reached.tolist() == [t <= at for t in range(LENGTH)]


def test_causality_of_the_cache_by_gradient():
    """The second of two appended positions sees the cached ones and both; the first not the second."""
    cache = decoder.init_cache(CFG, 1, LENGTH, jnp.float32)

    @jax.jit
    @jax.grad
    def grad(x, at):
        _, filled = decoder.extend(P, x[:, :4], jnp.array([4]), cache, CFG)
        hidden, _ = decoder.extend(P, x[:, 4:6], jnp.array([2]), filled, CFG)
        return jnp.square(hidden[0, at]).sum()

    for at, last in ((0, 4), (1, 5)):
        reached = np.abs(np.asarray(grad(inputs(1), at)[0])).max(-1) > 0
        assert reached.tolist() == [t <= last for t in range(LENGTH)]


def packed(x):
    """Rows of x as two samples and padding in one row."""
    lengths = (6, LENGTH)
    row = jnp.concatenate([x[0, :6], x[1], x[0, 6:9] * 0 + 5])[None]
    positions = [*range(6), *range(LENGTH), 0, 0, 0]
    segments = [1] * 6 + [2] * LENGTH + [0] * 3
    return row, jnp.array([positions]), jnp.array([segments]), lengths


def test_packed_rows_equal_separate_rows(whole):
    row, positions, segments, _ = packed(inputs())
    hidden = np.asarray(forward(P, row, positions, segments, cfg=CFG))[0]
    np.testing.assert_allclose(hidden[:6], whole[0, :6], atol=1e-5)
    np.testing.assert_allclose(hidden[6:16], whole[1], atol=1e-5)
    logits = decoder.logits(P, jnp.asarray(hidden[6:16]), CFG)
    np.testing.assert_allclose(logits, decoder.logits(P, whole[1] + jnp.zeros(()), CFG), atol=1e-4)
    assert np.isfinite(hidden).all()


def test_packed_gradients_equal_separate_gradients():
    weight = jax.random.normal(jax.random.key(5), (LENGTH, 32))

    def separate(p, x):
        out = decoder.forward(p, x, *plain(x), CFG)
        return (out[0, :6] * weight[:6]).sum() + (out[1] * weight).sum()

    def together(p, x):
        row, positions, segments, _ = packed(x)
        out = decoder.forward(p, row, positions, segments, CFG)[0]
        return (out[:6] * weight[:6]).sum() + (out[6:16] * weight).sum()

    expected = jax.jit(jax.grad(separate, (0, 1)))(P, inputs())
    got = jax.jit(jax.grad(together, (0, 1)))(P, inputs())
    assert_trees_close(got[0], expected[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got[1], expected[1], atol=1e-5)


def test_samples_of_a_row_do_not_see_each_other_by_gradient():
    row, positions, segments, _ = packed(inputs())

    def second(row):
        return jnp.square(decoder.forward(P, row, positions, segments, CFG)[0, 6:16]).sum()

    reached = np.abs(np.asarray(jax.grad(second)(row))[0]).max(-1) > 0
    assert reached.tolist() == [False] * 6 + [True] * 10 + [False] * 3


# The cache -------------------------------------------------------------------------------------------


def run_cached(x, chunks, size=LENGTH, cfg=CFG):
    """Feeds x to the cache in pieces of the given lengths."""
    cache, outs, start = decoder.init_cache(cfg, len(x), size, jnp.float32), [], 0
    for n in chunks:
        valid = jnp.full(len(x), n)
        hidden, cache = extend(P, x[:, start : start + n], valid, cache, cfg=cfg)
        outs.append(hidden)
        start += n
    return np.concatenate(outs, 1), cache


@pytest.mark.parametrize("chunks", [(10,), (4, 4, 2), (9, 1), (1,) * 10])
@pytest.mark.parametrize("size", [LENGTH, LENGTH + 7])
def test_cached_equals_forward(whole, chunks, size):
    """In one piece, in chunks, token by token; into a cache exactly full, and with room left."""
    hidden, cache = run_cached(inputs(), chunks, size)
    np.testing.assert_allclose(hidden, whole, atol=1e-5)
    assert cache.lengths.tolist() == [LENGTH, LENGTH]
    assert np.abs(cache.k[:, :, :, LENGTH - 1]).max() > 0  # The last slot is in use.


def test_rows_of_unequal_length(whole):
    """A prompt of 4 padded to 7 beside one of 7, then three tokens each, then one each."""
    x, lengths = inputs(), jnp.array([4, 7])
    cache = decoder.init_cache(CFG, 2, 12, jnp.float32)
    padded = x[:, :7].at[0, 4:].set(99.0)
    first, cache = extend(P, padded, lengths, cache, cfg=CFG)
    np.testing.assert_allclose(first[0, :4], whole[0, :4], atol=1e-5)
    np.testing.assert_allclose(first[1], whole[1, :7], atol=1e-5)
    following = jnp.stack([x[0, 4:7], x[1, 7:10]])
    second, cache = extend(P, following, jnp.array([3, 3]), cache, cfg=CFG)
    np.testing.assert_allclose(second[0], whole[0, 4:7], atol=1e-5)
    np.testing.assert_allclose(second[1], whole[1, 7:10], atol=1e-5)
    third, cache = extend(P, x[:, 7:8], jnp.array([1, 0]), cache, cfg=CFG)
    np.testing.assert_allclose(third[0, 0], whole[0, 7], atol=1e-5)
    assert cache.lengths.tolist() == [8, 10]


def test_writes_beyond_the_cache_are_dropped(whole):
    """Padding of a chunk that reaches over the end must not wrap round or land in the last slot."""
    x = inputs()
    _, cache = run_cached(x, (8,))
    padded = jnp.concatenate([x[:, 8:10], jnp.full((2, 3, 32), 99.0)], 1)
    hidden, full = extend(P, padded, jnp.array([2, 2]), cache, cfg=CFG)
    np.testing.assert_allclose(hidden[:, :2], whole[:, 8:10], atol=1e-5)
    _, expected = run_cached(x, (8, 2))
    assert_trees_close(full, expected, rtol=0, atol=1e-5)
    _, after = extend(P, x[:, :1], jnp.array([0, 0]), full, cfg=CFG)
    np.testing.assert_array_equal(after.k, full.k)


def test_what_stands_beyond_a_row_is_never_read():
    _, clean = run_cached(inputs(), (4,))
    dirty = clean.replace(k=clean.k.at[:, :, :, 4:].set(50.0), v=clean.v.at[:, :, :, 4:].set(50.0))
    outs = [extend(P, inputs()[:, 4:6], jnp.array([2, 2]), c, cfg=CFG)[0] for c in (clean, dirty)]
    np.testing.assert_array_equal(*outs)


def test_cache_shape_and_dtype():
    cache = decoder.init_cache(CFG, 3, 7, jnp.bfloat16)
    assert cache.k.shape == cache.v.shape == (2, 3, 2, 7, 8)
    assert cache.k.dtype == jnp.bfloat16 and cache.lengths.tolist() == [0, 0, 0]


# Options ---------------------------------------------------------------------------------------------


def reference(p, x, cfg):
    """The decoder from its formulas, one position and one head at a time."""
    p = jax.tree.map(lambda w: np.asarray(w, np.float64), p)
    x = np.asarray(x, np.float64)

    def rms(scale, y):
        return y / np.sqrt((y**2).mean(-1, keepdims=True) + cfg.norm_eps) * scale

    def turn(y, t):
        half = cfg.head_dim // 2
        angle = t * cfg.rope_theta ** (-np.arange(half) / half)
        a, b = y[:half], y[half:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin])

    for i in range(cfg.depth):
        w = jax.tree.map(lambda v, i=i: v[i], p["blocks"])
        y = rms(w["norm1"]["scale"], x)
        q, k, v = (y @ w["attn"][n]["kernel"] + w["attn"][n].get("bias", 0) for n in "qkv")
        q = q.reshape(len(x), cfg.num_heads, -1)
        k, v = (z.reshape(len(x), cfg.num_kv_heads, -1) for z in (k, v))
        attended = np.zeros_like(q)
        for t, n in np.ndindex(*q.shape[:2]):
            group = n // (cfg.num_heads // cfg.num_kv_heads)
            query = turn(q[t, n], t)
            scores = [query @ turn(k[s, group], s) / cfg.head_dim**0.5 for s in range(t + 1)]
            share = np.exp(scores - np.max(scores))
            attended[t, n] = share / share.sum() @ v[: t + 1, group]
        x = x + attended.reshape(len(x), -1) @ w["attn"]["out"]["kernel"] * cfg.residual_scale
        y = rms(w["norm2"]["scale"], x)
        gate = y @ w["mlp"]["gate"]["kernel"]
        y = gate / (1 + np.exp(-gate)) * (y @ w["mlp"]["up"]["kernel"])
        x = x + y @ w["mlp"]["down"]["kernel"] * cfg.residual_scale
    hidden = rms(p["norm"]["scale"], x) / cfg.logit_divisor
    return hidden, hidden @ (p["embed"].T if cfg.tied_head else p["head"])


OPTIONS = {
    "llama": {},
    "one_kv_head": {"num_kv_heads": 1},
    "multi_head": {"num_kv_heads": 4},
    "qwen": {"qkv_bias": True},
    "rope": {"rope_theta": 50.0, "norm_eps": 0.1},
    "minicpm": {
        "tied_head": True,
        "embed_scale": 12.0,
        "residual_scale": 0.3,
        "logit_divisor": 9.0,
    },
    "bluelm": {"tied_head": True, "embed_norm": True},
    "wide_heads": {"head_dim": 16},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_against_the_formulas(name):
    cfg = dataclasses.replace(CFG, **OPTIONS[name])
    p = draw(decoder.specs(cfg))
    x = inputs(1, 5)
    hidden = forward(p, x, *plain(x), cfg=cfg)
    expected, logits = reference(p, x[0], cfg)
    np.testing.assert_allclose(hidden[0], expected, atol=2e-5)
    np.testing.assert_allclose(decoder.logits(p, hidden, cfg)[0], logits, atol=1e-4)


def test_options_matter():
    """No two of the options above give the same hidden states from the same weights."""
    every = dataclasses.replace(CFG, qkv_bias=True, embed_norm=True)
    p, x = draw(decoder.specs(every)), inputs(1, 5)
    outs = []
    for fields in ({}, {"rope_theta": 50.0}, {"residual_scale": 0.3}, {"logit_divisor": 9.0}):
        cfg = dataclasses.replace(CFG, **fields)
        outs.append(np.asarray(forward(p, x, *plain(x), cfg=cfg)))
    for i, one in enumerate(outs):
        assert all(np.abs(one - other).max() > 1e-3 for other in outs[:i])


def test_embedding_scale_and_norm():
    cfg = dataclasses.replace(CFG, embed_scale=12.0, embed_norm=True)
    p = draw(decoder.specs(cfg))
    tokens = jnp.array([[3, 0], [279, 3]])
    rows = 12.0 * np.asarray(p["embed"])[np.asarray(tokens)]
    plain_cfg = dataclasses.replace(cfg, embed_norm=False)
    np.testing.assert_allclose(
        decoder.embed_tokens(p, tokens, plain_cfg, "float32"), rows, rtol=1e-6
    )
    normed = layers.layer_norm(p["embed_norm"], jnp.asarray(rows), cfg.norm_eps)
    np.testing.assert_allclose(decoder.embed_tokens(p, tokens, cfg, "float32"), normed, atol=1e-6)


def test_weights_that_options_declare():
    def names(**fields):
        specs = decoder.specs(dataclasses.replace(CFG, **fields))
        return set(specs), set(specs["blocks"]["attn"]["q"])

    assert names() == ({"embed", "blocks", "norm", "head"}, {"kernel"})
    assert names(tied_head=True)[0] == {"embed", "blocks", "norm"}
    assert names(embed_norm=True)[0] == {"embed", "blocks", "norm", "head", "embed_norm"}
    assert names(qkv_bias=True)[1] == {"kernel", "bias"}
    out = decoder.specs(dataclasses.replace(CFG, qkv_bias=True))["blocks"]["attn"]["out"]
    assert set(out) == {"kernel"}


@pytest.mark.parametrize(
    ("fields", "std"),
    [
        ({}, 1.0),
        ({"embed_scale": 12.0}, 1 / 12),
        ({"tied_head": True, "embed_scale": 12.0}, 32**-0.5),
    ],
)
def test_spread_of_the_embeddings(fields, std):
    specs = decoder.specs(dataclasses.replace(CFG, **fields))
    assert specs["embed"].std() == pytest.approx(std)


@pytest.mark.parametrize("option", [{"remat": True}, {"unroll": 2}])
def test_scan_options_change_neither_values_nor_gradients(option):
    x = inputs(1, 5)

    @functools.partial(jax.jit, static_argnames="cfg")
    def loss(p, cfg):
        return jax.value_and_grad(
            lambda p: jnp.square(decoder.forward(p, x, *plain(x), cfg)).sum()
        )(p)

    value, grads = loss(P, cfg=CFG)
    value2, grads2 = loss(P, cfg=dataclasses.replace(CFG, **option))
    np.testing.assert_allclose(value2, value, rtol=1e-6)
    assert_trees_close(grads2, grads, rtol=1e-4, atol=1e-5)
