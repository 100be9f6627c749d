"""Generation: greedy against the full forward pass, stopping, sampling, chunked prefill."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, Q, weights

from bluelm_jax import batch, generate, vlm
from bluelm_jax.generate import SamplingConfig, choose

P = weights()
LENGTHS = (14, 5, 11)
NEVER = 279  # A stop token that the tiny model does not come up with in these tests.


def make_prompts(lengths=LENGTHS, padded=16, seed=0):
    """Row 0 and 2 open with an image each, row 1 is text alone; padding holds other tokens."""
    rng = np.random.default_rng(seed)
    index = np.full((len(lengths), padded), batch.TEXT, np.int32)
    for row in (0, 2):
        index[row, 1 : 1 + Q] = (row // 2) * Q + np.arange(Q)
    return generate.Prompts(
        tokens=jnp.asarray(rng.integers(0, 250, index.shape), jnp.int32),
        lengths=jnp.array(lengths, jnp.int32),
        image_index=jnp.asarray(index),
        tiles=jnp.asarray(rng.integers(0, 256, (1, 2, 20, 20, 3), dtype=np.uint8)),
    )


PROMPTS = make_prompts()


def run(prompts=PROMPTS, stop=NEVER, cfg=TINY, seed=0, **sampling):
    sampling = SamplingConfig(**{"max_new_tokens": 6, **sampling})
    out = generate.generate(P, prompts, jax.random.key(seed), cfg=cfg, sampling=sampling, stop=stop)
    return jax.tree.map(np.asarray, out)


@pytest.fixture(scope="module")
def greedy():
    return run()


def test_greedy_equals_repeated_full_forward(greedy):
    """Every token is the argmax of a full forward pass over the prompt and the tokens before it."""
    rows, width = len(LENGTHS), max(LENGTHS) + 6
    full = jax.jit(vlm.logits, static_argnames="cfg")
    tokens = np.zeros((rows, width), np.int32)
    index = np.full((rows, width), batch.TEXT, np.int32)
    for row, n in enumerate(LENGTHS):
        tokens[row, :n] = PROMPTS.tokens[row, :n]
        index[row, :n] = PROMPTS.image_index[row, :n]
    for step in range(6):
        data = batch.Batch(
            tokens=jnp.asarray(tokens),
            loss_weights=jnp.zeros(tokens.shape),
            positions=jnp.tile(jnp.arange(width), (rows, 1)),
            segments=jnp.ones(tokens.shape, jnp.int32),
            image_index=jnp.asarray(index),
            tiles=PROMPTS.tiles,
        )
        scores = np.asarray(full(P, data, cfg=TINY))
        for row, n in enumerate(LENGTHS):
            at = n + step
            tokens[row, at] = scores[row, at - 1].argmax()
            assert greedy.tokens[row, step] == tokens[row, at], (row, step)
    assert greedy.lengths.tolist() == [6, 6, 6] and not greedy.stopped.any()
    assert len({tuple(row) for row in greedy.tokens}) == 3


def test_padding_does_not_matter(greedy):
    real = np.arange(16) < np.array(LENGTHS)[:, None]
    other = PROMPTS.replace(tokens=jnp.where(real, PROMPTS.tokens, 7))
    np.testing.assert_array_equal(run(other).tokens, greedy.tokens)


def test_wider_padding_does_not_matter(greedy):
    wide = jax.tree.map(
        lambda x: jnp.pad(x, ((0, 0), (0, 5))) if x.shape == (3, 16) else x, PROMPTS
    )
    np.testing.assert_array_equal(run(wide).tokens, greedy.tokens)


@pytest.mark.parametrize("chunk", [1, 5, 16, 100])
def test_chunked_prefill_is_equal(greedy, chunk):
    """Chunks of 5 do not divide 16, end inside row 1's prompt and after it, and overrun the cache."""
    got = run(prefill_chunk=chunk, max_new_tokens=2)
    np.testing.assert_array_equal(got.tokens, greedy.tokens[:, :2])


def test_prefill_returns_the_last_real_position():
    x = jax.random.normal(jax.random.key(0), (3, 16, 32))
    cache = generate.decoder.init_cache(TINY.decoder, 3, 16, jnp.float32)
    lengths = jnp.array(LENGTHS)
    whole, full = generate.prefill(P["decoder"], x, lengths, cache, TINY.decoder)
    last, chunked = generate.prefill(P["decoder"], x, lengths, cache, TINY.decoder, 5)
    positions = jnp.tile(jnp.arange(16), (3, 1))
    hidden = generate.decoder.forward(
        P["decoder"], x, positions, jnp.ones((3, 16), jnp.int32), TINY.decoder
    )
    expected = np.stack([hidden[row, n - 1] for row, n in enumerate(LENGTHS)])
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    np.testing.assert_allclose(last, expected, atol=1e-5)
    assert full.lengths.tolist() == chunked.lengths.tolist() == list(LENGTHS)
    for row, n in enumerate(LENGTHS):
        np.testing.assert_allclose(chunked.k[:, row, :, :n], full.k[:, row, :, :n], atol=1e-5)


def test_stop_token_ends_a_row(greedy):
    """The token that row 1 gives third is made the stop token: what stands before it stays."""
    stop = int(greedy.tokens[1, 2])
    got = run(stop=stop)
    for row in range(3):
        before = greedy.tokens[row].tolist()
        n = before.index(stop) if stop in before else 6
        assert got.tokens[row].tolist() == before[:n] + [stop] * (6 - n)
        assert got.lengths[row] == n and got.stopped[row] == (n < 6)
    assert got.lengths[1] <= 2


def test_stop_as_the_last_token_counts_as_stopped(greedy):
    stop = int(greedy.tokens[1, 0])
    got = run(stop=stop, max_new_tokens=1)
    assert got.stopped[1] and got.lengths[1] == 0 and got.tokens[1].tolist() == [stop]


def test_empty_rows_do_not_keep_a_batch_running(greedy):
    """A batch filled up with empty rows ends when its real rows have ended."""
    prompts = PROMPTS.replace(lengths=jnp.array([0, 5, 0]))
    stop = int(greedy.tokens[1, 2])
    got = run(prompts, stop=stop)
    assert got.lengths.tolist()[1] <= 2 and got.stopped.all()
    assert got.lengths[0] == got.lengths[2] == 0


def test_text_only_prompts_without_any_tile():
    prompts = PROMPTS.replace(
        image_index=jnp.full((3, 16), batch.TEXT), tiles=jnp.zeros((1, 0, 20, 20, 3), jnp.uint8)
    )
    spare = prompts.replace(tiles=PROMPTS.tiles)
    np.testing.assert_array_equal(run(prompts).tokens, run(spare).tokens)


def test_too_long_for_the_model():
    short = dataclasses.replace(TINY, decoder=dataclasses.replace(TINY.decoder, max_length=21))
    with pytest.raises(ValueError, match="prompt of 16 \\+ 6 new tokens exceeds max_length 21"):
        run(cfg=short)
    run(cfg=short, max_new_tokens=5)


def test_sampling_depends_on_the_seed_only():
    one, again, other = (run(temperature=1.0, seed=s).tokens for s in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)


# Choosing a token ------------------------------------------------------------------------------------

# Probabilities 0.4, 0.3, 0.15, 0.1, 0.05 in an order that is not sorted.
SHARES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])


def frequencies(count=4000, shares=SHARES, **sampling):
    cfg = SamplingConfig(temperature=sampling.pop("temperature", 1.0), **sampling)
    scores = jnp.tile(jnp.log(jnp.asarray(shares, jnp.float32)), (count, 1)) + 3
    drawn = collections.Counter(choose(scores, jax.random.key(0), cfg).tolist())
    return np.array([drawn[i] / count for i in range(len(shares))])


def kept(*tokens, shares=SHARES):
    expected = np.zeros(len(shares))
    expected[list(tokens)] = shares[list(tokens)]
    return expected / expected.sum()


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        ({}, (0, 1, 2, 3, 4)),
        ({"top_k": 1}, (1,)),
        ({"top_k": 2}, (1, 3)),
        ({"top_k": 9}, (0, 1, 2, 3, 4)),
        ({"top_p": 0.39}, (1,)),
        ({"top_p": 0.41}, (1, 3)),
        ({"top_p": 0.69}, (1, 3)),
        ({"top_p": 0.71}, (1, 3, 4)),
        ({"top_p": 0.96}, (0, 1, 2, 3, 4)),
        ({"top_p": 1e-6}, (1,)),
        # Of the two kept by top-k, the first has 4/7 of what is left.
        ({"top_k": 2, "top_p": 0.55}, (1,)),
        ({"top_k": 2, "top_p": 0.6}, (1, 3)),
    ],
)
def test_what_is_kept_and_how_often(sampling, tokens):
    got, expected = frequencies(**sampling), kept(*tokens)
    np.testing.assert_allclose(got, expected, atol=0.03)
    assert set(np.flatnonzero(got)) == set(tokens)


def test_temperature_sharpens_and_flattens():
    np.testing.assert_allclose(
        frequencies(temperature=0.5), SHARES**2 / (SHARES**2).sum(), atol=0.03
    )
    np.testing.assert_allclose(
        frequencies(temperature=2.0), SHARES**0.5 / (SHARES**0.5).sum(), atol=0.03
    )


def test_rows_are_drawn_independently_of_each_other():
    scores = jnp.log(jnp.array([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    cfg = SamplingConfig(temperature=1.0, top_p=0.9)
    drawn = {tuple(choose(scores, jax.random.key(s), cfg).tolist()) for s in range(20)}
    assert drawn == {(0, 2), (1, 2)}


def test_greedy_takes_the_first_of_equals():
    scores = jnp.array([[1.0, 3.0, 3.0], [2.0, 1.0, 0.0]])
    assert choose(scores, jax.random.key(0), SamplingConfig()).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("max_new_tokens", 0, "> 0"),
        ("temperature", -0.1, r"0, or finite and >= 1e-06"),
        ("top_k", -1, ">= 0"),
        ("top_p", 0.0, r"in \(0, 1\]"),
        ("top_p", 1.1, r"in \(0, 1\]"),
        ("prefill_chunk", -1, ">= 0"),
    ],
)
def test_bounds(field, value, bound):
    with pytest.raises(ValueError, match=rf"SamplingConfig.{field} = {value}: must be {bound}"):
        SamplingConfig(**{field: value})


def test_stop_tokens_of_any_kind(greedy):
    stop = int(greedy.tokens[1, 2])
    want = run(stop=(stop,)).lengths.tolist()
    for each in (stop, [stop], np.int64(stop), np.array([stop]), np.array(stop), {stop}):
        assert run(stop=each).lengths.tolist() == want
    with pytest.raises(ValueError, match=r"stop token 280: must be in 0\.\.279, the vocabulary"):
        run(stop=[280])
