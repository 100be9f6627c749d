"""The loss against NumPy, in chunks, at the borders of samples, and without supervision."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, Q, assert_trees_close, draw, make_batch

from bluelm_jax import decoder, loss

CFG = TINY.decoder
P = draw(decoder.specs(CFG))
BATCH = make_batch(rows=3, length=24, tiles=2)
HIDDEN = jax.random.normal(jax.random.key(1), (3, 24, 32))


def reference(p, hidden, batch, cfg):
    """Sums over pairs of neighbours in one segment whose second is supervised."""
    logits = np.asarray(hidden, np.float64) @ np.asarray(decoder.head_matrix(p, cfg), np.float64)
    total = correct = weight = 0.0
    for b, t in np.ndindex(batch.tokens.shape):
        if t == 0 or batch.segments[b, t] != batch.segments[b, t - 1]:
            continue
        w = float(batch.loss_weights[b, t])
        scores, target = logits[b, t - 1], int(batch.tokens[b, t])
        total -= w * (scores[target] - np.log(np.exp(scores).sum()))
        correct += w * (scores.argmax() == target)
        weight += w
    return total, correct, weight


@pytest.mark.parametrize("tied", [False, True])
def test_against_numpy(tied):
    cfg = dataclasses.replace(CFG, tied_head=tied)
    sums = loss.cross_entropy(P, HIDDEN, BATCH, cfg)
    total, correct, weight = reference(P, HIDDEN, BATCH, cfg)
    assert weight > 5
    np.testing.assert_allclose(
        [sums.loss, sums.correct, sums.weight], [total, correct, weight], 1e-5
    )


def test_correct_counts_the_argmax():
    """Hidden states that point at the target's column of the head."""
    targets, weights = loss.next_token_targets(BATCH)
    aligned = 20 * P["head"].T[targets]
    sums = loss.cross_entropy(P, aligned, BATCH, CFG)
    scores = np.asarray(aligned @ P["head"])
    hits = (scores.argmax(-1) == np.asarray(targets)) * np.asarray(weights)
    assert float(sums.correct) == hits.sum() > 0.8 * float(sums.weight)
    assert float(loss.cross_entropy(P, -aligned, BATCH, CFG).correct) == 0


def test_fractional_weights_scale_the_loss():
    half = BATCH.replace(loss_weights=BATCH.loss_weights / 2)
    one, two = (loss.cross_entropy(P, HIDDEN, b, CFG) for b in (BATCH, half))
    assert_trees_close(two, jax.tree.map(lambda x: x / 2, one), rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 8, 12, 24, 100])
def test_chunks_equal_the_whole(chunk):
    def value(p, hidden, chunk):
        sums = loss.cross_entropy(p, hidden, BATCH, CFG, chunk)
        return sums.loss, sums

    grad = jax.jit(jax.grad(value, (0, 1), has_aux=True), static_argnums=2)
    (whole_p, whole_h), whole = grad(P, HIDDEN, 0)
    (chunked_p, chunked_h), chunked = grad(P, HIDDEN, chunk)
    assert_trees_close(chunked, whole, rtol=1e-5)
    np.testing.assert_allclose(chunked_p["head"], whole_p["head"], atol=1e-5)
    np.testing.assert_allclose(chunked_h, whole_h, atol=1e-5)


def test_chunked_loss_never_holds_all_logits():
    def grad(chunk):
        f = jax.grad(lambda h: loss.cross_entropy(P, h, BATCH, CFG, chunk).loss)
        return str(jax.make_jaxpr(f)(HIDDEN))

    assert "f32[3,24,280]" in grad(0)
    assert "f32[3,24,280]" not in grad(8) and "f32[3,8,280]" in grad(8)
    assert "f32[3,3,8,280]" not in grad(8)  # Nor stacked over the chunks for the backward pass.


@pytest.mark.parametrize("chunk", [0, 8])
def test_without_a_supervised_token(chunk):
    batch = BATCH.replace(loss_weights=jnp.zeros_like(BATCH.loss_weights))
    f = jax.value_and_grad(lambda h: loss.cross_entropy(P, h, batch, CFG, chunk).loss)
    value, grad = f(HIDDEN)
    assert value == 0 and not grad.any()
    assert float(loss.cross_entropy(P, HIDDEN, batch, CFG, chunk).weight) == 0


def test_targets_by_hand():
    batch = make_batch(rows=1, length=24, tiles=1).replace(
        tokens=jnp.array([[5, 6, 7, 8, 9, 10, 0, 0]]),
        loss_weights=jnp.array([[1.0, 1, 0, 1, 1, 1, 1, 1]]),
        positions=jnp.array([[0, 1, 2, 0, 1, 2, 0, 0]]),
        segments=jnp.array([[1, 1, 1, 2, 2, 2, 0, 0]]),
        image_index=jnp.full((1, 8), -1),
    )
    targets, weights = loss.next_token_targets(batch)
    assert targets.tolist() == [[6, 7, 8, 9, 10, 0, 0, 0]]
    # Not 8 from 7, nor padding from 10: the sample ends between them. The last has no successor.
    assert weights.tolist() == [[1, 0, 0, 1, 1, 0, 1, 0]]


def test_never_predicts_across_samples_by_gradient():
    """A loss on the first token of every sample alone has no gradient anywhere."""
    first = jnp.asarray(BATCH.positions == 0, jnp.float32)
    batch = BATCH.replace(loss_weights=first * (BATCH.segments > 0))
    assert batch.loss_weights.sum() == 6
    sums = loss.cross_entropy(P, HIDDEN, batch, CFG)
    assert float(sums.weight) == float(sums.loss) == 0


def test_sums_add():
    one = loss.LossSums(loss=jnp.float32(1), correct=jnp.float32(2), weight=jnp.float32(3))
    total = one + one
    assert (total.loss, total.correct, total.weight) == (2, 4, 6)


def test_logits_are_not_rounded_in_bfloat16():
    """The loss of bfloat16 hidden states is that of the exact products, not of rounded logits."""
    hidden = 8 * HIDDEN.astype(jnp.bfloat16)
    p = {**P, "head": 4 * P["head"].astype(jnp.bfloat16).astype(jnp.float32)}
    sums = loss.cross_entropy(p, hidden, BATCH, CFG)
    total, _, _ = reference(p, hidden, BATCH, CFG)
    np.testing.assert_allclose(sums.loss, total, rtol=1e-5)


def test_helper_batches_have_what_the_tests_need():
    assert (np.asarray(BATCH.image_index) >= 0).sum() == 3 * Q
    assert set(np.unique(BATCH.segments)) == {0, 1, 2}
