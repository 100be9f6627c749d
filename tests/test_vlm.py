"""Image tokens in their places: literal indices, groups, newlines, gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, Q, batch_arrays, make_batch, weights

from bluelm_jax import decoder, generate, layout, presets, vlm
from bluelm_jax.batch import NEWLINE, TEXT

CFG = dataclasses.replace(TINY, newline=True)
P = weights(CFG)


def text(tokens, cfg=CFG):
    return np.asarray(
        decoder.embed_tokens(P["decoder"], jnp.asarray(tokens), cfg.decoder, "float32")
    )


def sequences(tokens, index, **corners):
    """What `splice` reads of a batch."""
    tokens = jnp.asarray(tokens)
    tiles = jnp.zeros((1, 1, 20, 20, 3), jnp.uint8)
    lengths = jnp.zeros(len(tokens), jnp.int32)
    return generate.Prompts(
        tokens=tokens, lengths=lengths, image_index=jnp.asarray(index), tiles=tiles, **corners
    )


def splice(tokens, index, images, cfg=CFG, **corners):
    read = sequences(tokens, index, **corners)
    return np.asarray(vlm.splice(P, read, jnp.asarray(images, jnp.float32), cfg))


def marked(groups, count):
    """Image token t of group g is 100 g + t in every dimension."""
    values = 100 * np.arange(groups)[:, None, None] + np.arange(count)[None, :, None]
    return np.broadcast_to(values, (groups, count, 32))


def test_splice_on_literal_indices():
    tokens = [[7, 1, 1, 8, 9], [5, 6, 1, 1, 1]]
    index = [[TEXT, 3, 0, NEWLINE, TEXT], [TEXT, TEXT, 5, NEWLINE, 5]]
    x = splice(tokens, index, marked(1, 6))
    words = text(tokens)
    for row, col in ((0, 0), (0, 4), (1, 0), (1, 1)):
        np.testing.assert_array_equal(x[row, col], words[row, col])
    for row, col, value in ((0, 1, 3), (0, 2, 0), (1, 2, 5), (1, 4, 5)):
        np.testing.assert_array_equal(x[row, col], np.full(32, value))
    for row, col in ((0, 3), (1, 3)):
        np.testing.assert_array_equal(x[row, col], P["newline"])


def test_without_a_newline_vector_the_token_stands():
    p = {k: v for k, v in P.items() if k != "newline"}
    x = vlm.splice(p, sequences([[4]], [[NEWLINE]]), jnp.zeros((1, 1, 32)), TINY)
    np.testing.assert_array_equal(x, text([[4]]))
    assert "newline" not in vlm.specs(TINY) and vlm.specs(CFG)["newline"].shape == (32,)


def test_corners_are_blended():
    """Text and newlines stay; an image position is the weighted sum of four tokens of its group."""
    index = [[TEXT, 2, NEWLINE], [TEXT, 0, TEXT]]
    corner_index = jnp.zeros((2, 3, 4), jnp.int32).at[:, 1].set(jnp.array([0, 1, 2, 3]))
    corner_weights = jnp.zeros((2, 3, 4)).at[:, 1].set(jnp.array([0.1, 0.2, 0.3, 0.4]))
    corners = {"corner_index": corner_index, "corner_weights": corner_weights}
    x = splice([[4, 4, 4], [5, 5, 5]], index, marked(2, 4), **corners)
    np.testing.assert_allclose(x[0, 1], np.full(32, 2.0), atol=1e-5)
    np.testing.assert_allclose(x[1, 1], np.full(32, 102.0), atol=1e-4)
    np.testing.assert_array_equal(x[0, 0], text([[4]])[0, 0])
    np.testing.assert_array_equal(x[0, 2], P["newline"])


def test_rows_gather_from_their_own_group():
    tokens = np.zeros((4, 2), np.int32)
    index = [[0, 1], [1, 0], [2, 2], [TEXT, 1]]
    x = splice(tokens, index, marked(2, 3))[..., 0]
    np.testing.assert_array_equal(x[:3], [[0, 1], [1, 0], [102, 102]])
    assert x[3, 1] == 101


def test_an_index_beyond_the_tiles_is_loud():
    assert np.isnan(splice([[0]], [[3]], marked(1, 3))).all()


def test_no_tiles_at_all():
    batch = make_batch(tiles=0)
    assert np.isfinite(vlm.logits(P, batch, CFG)).all()


@pytest.fixture(scope="module")
def shared():
    batch = make_batch(rows=4, groups=1, tiles=3)
    return batch, np.asarray(vlm.logits(P, batch, CFG))


def test_groups_do_not_change_the_result(shared):
    """One group of all rows, and one group a row with copies of the tiles, give the same logits."""
    batch, expected = shared
    alone = batch.replace(tiles=jnp.repeat(batch.tiles, 4, axis=0))
    np.testing.assert_allclose(vlm.logits(P, alone, CFG), expected, atol=1e-5)


def test_tiles_in_another_order_with_indices_to_match(shared):
    batch, expected = shared
    index = batch.image_index
    turned = jnp.where(index >= 0, (2 - index // Q) * Q + index % Q, index)
    other = batch.replace(tiles=batch.tiles[:, ::-1], image_index=turned)
    np.testing.assert_allclose(vlm.logits(P, other, CFG), expected, atol=1e-5)


def test_gradient_reaches_referenced_tiles_only():
    arrays = batch_arrays(rows=2, groups=2, tiles=3)
    arrays["image_index"][0, 1 : 1 + Q] = 1 * Q + np.arange(Q)
    arrays["image_index"][1, 1 : 1 + Q] = 2 * Q + np.arange(Q)
    images = vlm.encode_groups(P, jnp.asarray(arrays["tiles"]), CFG)

    tokens, index = jnp.asarray(arrays["tokens"]), jnp.asarray(arrays["image_index"])

    def out(images):
        x = vlm.splice(P, sequences(tokens, index), images, CFG)
        return jnp.square(x).sum()

    grad = np.asarray(jax.grad(out)(images)).reshape(2, 3, Q, 32)
    reached = [[bool(grad[g, i].any()) for i in range(3)] for g in range(2)]
    assert reached == [[False, True, False], [False, False, True]]
    assert np.abs(grad[0, 1]).min() > 0


def test_ids_under_image_tokens_do_not_matter(shared):
    batch, expected = shared
    tokens = jnp.where(batch.image_index >= 0, 3, batch.tokens)
    np.testing.assert_allclose(
        vlm.logits(P, batch.replace(tokens=tokens), CFG), expected, atol=1e-6
    )


def test_encode_groups_keeps_group_and_tile_order():
    tiles = make_batch(rows=4, groups=2, tiles=2).tiles
    grouped = vlm.encode_groups(P, tiles, CFG)
    assert grouped.shape == (2, 2 * Q, 32)
    single = vlm.encode_tiles(P, tiles[1, 1:], CFG)
    np.testing.assert_allclose(grouped[1, Q:], single[0], atol=1e-5)


def test_bfloat16_stays_near_float32_and_gives_float32_logits(shared):
    batch, expected = shared
    cfg = dataclasses.replace(CFG, dtype="bfloat16")
    assert vlm.forward(P, batch, cfg).dtype == jnp.bfloat16
    got = np.asarray(vlm.logits(P, batch, cfg))
    assert got.dtype == np.float32
    assert np.abs(got - expected).max() < 0.1 * np.abs(expected).max()
    # Rounded to bfloat16 after the head, every logit would have 16 zero bits.
    assert (got.view(np.uint32) & 0xFFFF).any()


def test_token_side():
    assert layout.token_side(TINY) == 3
    assert layout.token_side(presets.bluelm_v_3b()) == 14
