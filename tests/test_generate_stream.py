"""Streaming, several stop tokens, the penalty in the loop, and the layout for decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, draw, weights
from test_generate import PROMPTS, P, greedy, make_prompts, run  # noqa: F401 (a fixture)

from bluelm_jax import decoder, decoding, generate, layers, sampling
from bluelm_jax.generate import NOTHING, SamplingConfig

SIX = SamplingConfig(max_new_tokens=6)
KEY = jax.random.key(0)


def prepared(rows, p=P):
    ready = decoding.prepare(p["decoder"], TINY.decoder, rows=rows, dtype="float32")
    return {**p, "decoder": ready}


def streamed(p, stop, how=SIX, count=4, prompts=PROMPTS):
    """Tokens of `stream` as [B, T]."""
    found = generate.stream(p, prompts, KEY, cfg=TINY, sampling=how, stop=stop, count=count)
    return np.stack(list(found), axis=1)


# Streaming -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 4, 50])
def test_stream_equals_generate(greedy, count):  # noqa: F811
    got = streamed(P, 279, count=count)
    np.testing.assert_array_equal(got, greedy.tokens)


def test_stream_gives_nothing_from_a_rows_stop_on(greedy):  # noqa: F811
    stop = int(greedy.tokens[1, 2])
    whole, got = run(stop=stop), streamed(P, stop)
    for row, n in enumerate(whole.lengths):
        assert got[row, :n].tolist() == whole.tokens[row, :n].tolist()
        assert (got[row, n:] == NOTHING).all()


def test_stream_ends_when_all_rows_have_stopped(greedy):  # noqa: F811
    stops = tuple({int(t) for t in greedy.tokens[:, 1]})
    assert streamed(P, stops).shape[1] <= 2


def test_sampled_stream_equals_generate():
    how = SamplingConfig(max_new_tokens=6, temperature=1.0, top_p=0.9, repetition_penalty=1.3)
    out = generate.generate(P, PROMPTS, KEY, cfg=TINY, sampling=how, stop=279)
    np.testing.assert_array_equal(streamed(P, 279, how, count=3), out.tokens)


def test_a_stream_that_is_left_early_does_no_more_work():
    found = generate.stream(P, PROMPTS, KEY, cfg=TINY, sampling=SIX, stop=279, count=1)
    first = next(found)
    found.close()
    assert first.shape == (3,) and next(found, None) is None


# Stop tokens -----------------------------------------------------------------------------------------


def test_any_of_several_stop_tokens_ends_a_row(greedy):  # noqa: F811
    stops = (int(greedy.tokens[0, 2]), int(greedy.tokens[1, 3]))
    got = run(stop=stops)
    for row in range(3):
        before = greedy.tokens[row].tolist()
        n = next((i for i, t in enumerate(before) if t in stops), 6)
        assert got.lengths[row] == n and got.stopped[row] == (n < 6)
        assert got.tokens[row, : n + 1].tolist() == before[: n + 1]
        assert (got.tokens[row, n + 1 :] == stops[0]).all()


def test_without_stop_tokens_rows_fill_up(greedy):  # noqa: F811
    got = run(stop=())
    np.testing.assert_array_equal(got.tokens, greedy.tokens)
    assert got.lengths.tolist() == [6, 6, 6] and not got.stopped.any()


def test_no_stop_before_min_new_tokens(greedy):  # noqa: F811
    """The first choice of row 1 is banned for two steps; other rows choose as ever up to it."""
    stop = int(greedy.tokens[1, 0])
    assert run(stop=stop).lengths[1] == 0
    got = run(stop=stop, min_new_tokens=2)
    assert got.lengths[1] >= 2 and stop not in got.tokens[1, :2]


# The repetition penalty ------------------------------------------------------------------------------


def test_penalty_counts_prompt_and_answer_but_no_image_and_no_padding():
    """Each step against logits of the full forward pass with the penalty applied by NumPy."""
    penalty, new = 1.7, 5
    got = run(repetition_penalty=penalty, max_new_tokens=new, stop=())
    prompts, real = PROMPTS, np.asarray(PROMPTS.lengths)
    for row, n in enumerate(real):
        text = np.asarray(prompts.image_index[row, :n]) == -1
        seen = set(np.asarray(prompts.tokens[row, :n])[text].tolist())
        images = set(np.asarray(prompts.tokens[row, :n])[~text].tolist()) - seen
        scores = logits_after(row, got.tokens[row, : new - 1].tolist())
        for step in range(new):
            adjusted = scores[step].copy()
            for token in seen:
                adjusted[token] *= 1 / penalty if adjusted[token] > 0 else penalty
            assert adjusted.argmax() == got.tokens[row, step], (row, step, images)
            seen.add(int(got.tokens[row, step]))
    assert (got.tokens != run(max_new_tokens=new, stop=()).tokens).any()


def logits_after(row, answer):
    """Logits of one row at its prompt's end and after each token of `answer`."""
    state = generate.start(P, PROMPTS, KEY, cfg=TINY, sampling=SIX, stop=())
    one = jax.tree.map(lambda x: x[:, row : row + 1], (state.cache.k, state.cache.v))
    n = int(PROMPTS.lengths[row])
    # The last prompt position is read again, so that its logits are there too.
    cache = decoder.KVCache(k=one[0], v=one[1], lengths=jnp.array([n - 1]))
    images = generate.vlm.encode_groups(P, PROMPTS.tiles, TINY)
    x = generate.vlm.splice(P, PROMPTS, images, TINY)[row : row + 1, n - 1 : n]
    more = decoder.embed_tokens(P["decoder"], jnp.array([answer]), TINY.decoder, "float32")
    x = jnp.concatenate([x, more], axis=1)
    hidden, _ = decoder.extend(P["decoder"], x, jnp.array([x.shape[1]]), cache, TINY.decoder)
    return np.array(decoder.logits(P["decoder"], hidden, TINY.decoder)[0])


# Weights laid out for decoding -----------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_prepared_weights_choose_the_same_tokens(greedy, rows):  # noqa: F811
    out = generate.generate(prepared(rows), PROMPTS, KEY, cfg=TINY, sampling=SIX, stop=279)
    np.testing.assert_array_equal(out.tokens, greedy.tokens)
    np.testing.assert_array_equal(streamed(prepared(rows), 279), greedy.tokens)


OPTIONS = {
    "llama": {},
    "qwen": {"qkv_bias": True},
    "minicpm": {"tied_head": True, "embed_scale": 12.0, "residual_scale": 0.3},
    "one_kv_head": {"num_kv_heads": 1},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("rows", [1, 2])
def test_prepared_extend_equals_forward(name, rows):
    """A prompt in a chunk, then one position a call, from a cache of a tuple of blocks."""
    cfg = dataclasses.replace(TINY.decoder, **OPTIONS[name])
    p = draw(decoder.specs(cfg))
    x = jax.random.normal(KEY, (rows, 7, 32))
    positions = jnp.tile(jnp.arange(7), (rows, 1))
    want = decoder.forward(p, x, positions, jnp.ones((rows, 7), jnp.int32), cfg)
    ready = decoding.prepare(p, cfg, rows=rows, dtype="float32")
    cache = decoder.init_cache(cfg, rows, 7, jnp.float32, stacked=False)
    got = []
    extend = jax.jit(decoder.extend, static_argnames="cfg")
    for start, stop in ((0, 5), (5, 6), (6, 7)):
        valid = jnp.full(rows, stop - start)
        hidden, cache = extend(ready, x[:, start:stop], valid, cache, cfg=cfg)
        got.append(hidden)
    np.testing.assert_allclose(np.concatenate(got, 1), want, atol=1e-5)
    last = decoder.logits(p, want[:, -1], cfg)
    head = layers.linear({"kernel": decoder.head_matrix(p, cfg)}, want[:, -1])
    np.testing.assert_allclose(last, head, atol=1e-4)


def test_prepare_leaves_prepared_weights_and_casts():
    ready = decoding.prepare(P["decoder"], TINY.decoder, rows=2, dtype="bfloat16")
    assert decoding.prepare(ready, TINY.decoder, rows=1, dtype="float32") is ready
    assert decoding.is_prepared(ready) and not decoding.is_prepared(P["decoder"])
    qkv = ready["blocks"][1]["attn"]["qkv"]["rows"]
    assert qkv.dtype == jnp.bfloat16 and qkv.shape == (32 + 2 * 16, 32)
    kernels = [P["decoder"]["blocks"]["attn"][n]["kernel"][1] for n in "qkv"]
    want = np.concatenate([np.asarray(k) for k in kernels], 1).T
    np.testing.assert_allclose(qkv.astype(jnp.float32), want, rtol=1e-2)


@pytest.mark.parametrize("rows", [1, 3])
def test_prepared_norm_scales_stay_float32(rows):
    """1.0039 rounds to 1.0078 in bfloat16: twice the distance from 1."""
    p = draw(decoder.specs(TINY.decoder))
    scale = jnp.full((TINY.decoder.depth, TINY.decoder.width), 1.0039)
    p["blocks"] = {**p["blocks"], "norm1": {"scale": scale}, "norm2": {"scale": scale}}
    ready = decoding.prepare(p, TINY.decoder, rows=rows, dtype="bfloat16")
    for block in ready["blocks"]:
        for norm in ("norm1", "norm2"):
            assert block[norm]["scale"].dtype == jnp.float32
            np.testing.assert_array_equal(block[norm]["scale"], scale[0])
    cfg = dataclasses.replace(TINY, dtype="bfloat16")
    stored, prepared = {**P, "decoder": p}, {**P, "decoder": ready}
    tokens = [
        generate.generate(each, PROMPTS, KEY, cfg=cfg, sampling=SIX, stop=()).tokens
        for each in (stored, prepared)
    ]
    np.testing.assert_array_equal(tokens[0], tokens[1])


def test_many_rows_write_by_scatter_and_few_by_slices():
    """Both ways of writing one position a row give the same cache, full rows included."""
    cache = jax.random.normal(KEY, (20, 2, 5, 4))
    new = jax.random.normal(jax.random.key(1), (20, 1, 2, 4))
    positions = jnp.arange(20)[:, None] % 7  # 5 and 6 are past the end.
    many = decoder._write(cache, new, positions)
    few = [
        decoder._write(cache[i : i + 4], new[i : i + 4], positions[i : i + 4])
        for i in range(0, 20, 4)
    ]
    np.testing.assert_array_equal(many, np.concatenate(few))
    kept = np.asarray(positions[:, 0] >= 5)
    np.testing.assert_array_equal(np.asarray(many)[kept], np.asarray(cache)[kept])
    assert (np.asarray(many) != np.asarray(cache)).any(axis=(1, 2, 3))[~kept].all()


@functools.cache
def text_weights():
    return {"decoder": weights()["decoder"]}


def test_text_prompts_need_no_vision_weights(greedy):  # noqa: F811
    prompts = make_prompts().replace(
        image_index=jnp.full((3, 16), -1), tiles=jnp.zeros((1, 0, 20, 20, 3), jnp.uint8)
    )
    alone = generate.generate(text_weights(), prompts, KEY, cfg=TINY, sampling=SIX, stop=279)
    whole = generate.generate(P, prompts, KEY, cfg=TINY, sampling=SIX, stop=279)
    np.testing.assert_array_equal(alone.tokens, whole.tokens)


def test_the_library_re_exports_what_callers_use():
    assert generate.SamplingConfig is sampling.SamplingConfig
