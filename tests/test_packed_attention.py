"""Attention of packed rows: the mask by hand, blocks against the whole, what a training step holds."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, draw

from bluelm_jax import decoder, layers, loss
from bluelm_jax.batch import Batch

SEGMENTS = jnp.array([[1] * 5 + [2] * 6 + [0] * 2, [1] * 11 + [2] + [0]])
LENGTH = SEGMENTS.shape[1]


def inputs(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, LENGTH, heads, 8) for heads in (4, 2, 2)]
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def test_mask_by_hand():
    mask = layers.packed_mask(jnp.array([[1, 1, 2, 2, 0]]))
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    assert mask[0].astype(int).tolist() == expected
    part = layers.packed_mask(jnp.array([[1, 1, 2, 2]]), 2, 4)
    assert part[0].astype(int).tolist() == [[0, 0, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize("block", [1, 4, 5, 12, 13, 64])
def test_blocks_equal_the_whole(block):
    """Outputs and gradients, also where blocks do not divide the row or cut a sample in two."""
    q, k, v = inputs()
    weight = jax.random.normal(jax.random.key(1), q.shape)

    def value(q, k, v, block):
        out = layers.packed_attention(q, k, v, SEGMENTS, block)
        return (out * weight).sum(), out

    grad = jax.jit(jax.grad(value, (0, 1, 2), has_aux=True), static_argnums=3)
    grads, out = grad(q, k, v, block)
    expected_grads, expected = grad(q, k, v, 0)
    np.testing.assert_allclose(out, expected, atol=1e-6)
    for got, want in zip(grads, expected_grads, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_whole_by_hand():
    """Each sample alone through plain attention with a triangular mask."""
    q, k, v = inputs()
    out = layers.packed_attention(q, k, v, SEGMENTS)
    for row, start, stop in [(0, 0, 5), (0, 5, 11), (1, 0, 11), (1, 11, 12)]:
        span = (slice(row, row + 1), slice(start, stop))
        triangle = jnp.tril(jnp.ones((1, stop - start, stop - start), bool))
        alone = layers.attention(q[span], k[span], v[span], triangle)
        np.testing.assert_allclose(out[span], alone, atol=1e-6)


# What a training step holds --------------------------------------------------------------------------

ROWS, LONG, BLOCK = 2, 192, 32
CFG = dataclasses.replace(TINY.decoder, vocab_size=1021)


@functools.cache
def compiled_gradient(block: int, chunk: int, remat: bool) -> str:
    """Optimised program of the decoder's loss and gradients, as the compiler prints it."""
    cfg = dataclasses.replace(CFG, attention_block=block, remat=remat)
    weights = draw(decoder.specs(cfg))
    row = jnp.arange(LONG)
    batch = Batch(
        tokens=jnp.tile(row, (ROWS, 1)) % 7,
        loss_weights=jnp.ones((ROWS, LONG)),
        positions=jnp.tile(row % 96, (ROWS, 1)),
        segments=jnp.tile(1 + row // 96, (ROWS, 1)),
        image_index=jnp.full((ROWS, LONG), -1),
        tiles=jnp.zeros((1, 0, 20, 20, 3), jnp.uint8),
    )

    def value(p):
        x = decoder.embed_tokens(p, batch.tokens, cfg, jnp.float32)
        hidden = decoder.forward(p, x, batch.positions, batch.segments, cfg)
        return loss.cross_entropy(p, hidden, batch, cfg, chunk).loss

    return jax.jit(jax.grad(value)).lower(weights).compile().as_text()


def largest(program: str, *dims: int) -> int:
    """Elements of the largest float array of a program whose shape has all of `dims`."""
    shapes = re.findall(r"(?:f32|bf16)\[([\d,]+)\]", program)
    sizes = [tuple(map(int, shape.split(","))) for shape in shapes]
    return max((math.prod(s) for s in sizes if set(dims) <= set(s)), default=0)


@pytest.mark.parametrize("remat", [False, True])
def test_a_training_step_holds_no_square_of_scores(remat):
    """The compiled step has [B, N, L, L] only when it is asked to take all queries at once."""
    square = ROWS * CFG.num_heads * LONG * LONG
    scores = re.compile(rf"f32\[[\d,]*\b{LONG},{LONG}\]|f32\[[\d,]*\b{2 * LONG},{LONG}\]")
    assert scores.search(compiled_gradient(0, 0, remat))
    program = compiled_gradient(BLOCK, 48, remat)
    assert not scores.search(program)
    assert 0 < largest(program, LONG) < square / 2


def test_a_training_step_holds_no_logits_of_all_positions():
    everything = ROWS * LONG * CFG.vocab_size
    assert largest(compiled_gradient(0, 0, False), CFG.vocab_size) == everything
    # 48 positions at a time; the largest array of the vocabulary is then the embedding or head.
    at_once = max(ROWS * 48 * CFG.vocab_size, CFG.width * CFG.vocab_size)
    assert largest(compiled_gradient(BLOCK, 48, False), CFG.vocab_size) == at_once
