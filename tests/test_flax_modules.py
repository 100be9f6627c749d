"""Flax modules give the outputs and gradients of the functions, over the same trees."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors, nnx
from flax.training import train_state
from model_helpers import TINY, assert_trees_close, draw, make_batch

from bluelm_jax import config, decoder, downsample, flax_modules, params, vision, vlm

BATCH = make_batch(rows=2, length=24, tiles=2)
TILES = BATCH.tiles[0]
WEIGHTS = draw(vlm.specs(TINY))


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype.name), tree)


def same_values_and_gradients(module, weights, inputs, function):
    """Both ways from weights to a scalar that depends on every output."""

    def scalar(out):
        probe = jnp.cos(jnp.arange(out.size)).reshape(out.shape)
        return (out * probe).sum(), out

    from_module = lambda p: scalar(module.apply({"params": p}, *inputs))  # noqa: E731
    from_function = lambda p: scalar(function(p, *inputs))  # noqa: E731
    (_, out), grads = jax.jit(jax.value_and_grad(from_module, has_aux=True))(weights)
    (_, expected), expected_grads = jax.jit(jax.value_and_grad(from_function, has_aux=True))(
        weights
    )
    np.testing.assert_array_equal(out, expected)
    assert_trees_close(grads, expected_grads, rtol=1e-6, atol=1e-6)
    assert all(np.any(g != 0) for g in jax.tree.leaves(grads))


def test_vision_tower():
    module = flax_modules.VisionTower(TINY.vision)
    encode = lambda p, tiles: vision.encode(p, tiles, TINY.vision, jnp.float32)  # noqa: E731
    # A constant added to all keys changes no softmax, so their bias has no gradient to speak of.
    weights = WEIGHTS["vision"]
    same_values_and_gradients(module, weights, (TILES,), encode)
    half = flax_modules.VisionTower(TINY.vision, dtype="bfloat16")
    assert half.apply({"params": weights}, TILES).dtype == jnp.bfloat16


def test_connector():
    def function(p, features):
        tokens = downsample.downsample(p["downsampler"], features, TINY)
        return downsample.project(p["projector"], tokens, TINY)

    features = jax.random.normal(jax.random.key(3), (2, TINY.vision.side**2, TINY.vision.width))
    weights = {name: WEIGHTS[name] for name in ("downsampler", "projector")}
    same_values_and_gradients(flax_modules.Connector(TINY), weights, (features,), function)


def test_connector_without_weights_of_its_own():
    """The tree of `vlm.specs` has no entry for a downsampler that has no weights."""
    cfg = dataclasses.replace(TINY, downsampler=config.PixelShuffle())
    tree = {k: v for k, v in draw(vlm.specs(cfg)).items() if k in ("downsampler", "projector")}
    assert list(tree) == ["projector"]
    features = jax.random.normal(jax.random.key(3), (2, cfg.vision.side**2, cfg.vision.width))
    got = flax_modules.Connector(cfg).apply({"params": tree}, features)
    tokens = downsample.downsample({}, features, cfg)
    np.testing.assert_array_equal(got, downsample.project(tree["projector"], tokens, cfg))


def test_decoder():
    def function(p, tokens, positions, segments):
        x = decoder.embed_tokens(p, tokens, TINY.decoder, jnp.float32)
        return decoder.logits(
            p, decoder.forward(p, x, positions, segments, TINY.decoder), TINY.decoder
        )

    module, weights = flax_modules.Decoder(TINY.decoder), WEIGHTS["decoder"]
    packed = (BATCH.tokens, BATCH.positions, BATCH.segments)
    same_values_and_gradients(module, weights, packed, function)
    rows = jnp.broadcast_to(jnp.arange(24)[None], (2, 24))
    plain = module.apply({"params": weights}, BATCH.tokens)
    expected = function(weights, BATCH.tokens, rows, jnp.ones_like(rows))
    np.testing.assert_allclose(plain, expected, atol=1e-5)


def test_vlm():
    function = lambda p, batch: vlm.logits(p, batch, TINY)  # noqa: E731
    same_values_and_gradients(flax_modules.VLM(TINY), WEIGHTS, (BATCH,), function)
    hidden = flax_modules.VLM(TINY).apply({"params": WEIGHTS}, BATCH, method="hidden")
    np.testing.assert_allclose(hidden, vlm.forward(WEIGHTS, BATCH, TINY), atol=1e-6)


def test_init_makes_the_same_tree():
    made = flax_modules.VLM(TINY).init(jax.random.key(0), BATCH)
    assert list(made) == ["params"]
    assert shapes(made["params"]) == shapes(params.init(vlm.specs(TINY), jax.random.key(0)))
    tower = made["params"]["vision"]["blocks"]["mlp"]["fc1"]["kernel"]
    assert np.std(tower) == pytest.approx(TINY.vision.width**-0.5, rel=0.1)
    other = flax_modules.VLM(TINY).init(jax.random.key(1), BATCH)["params"]
    assert np.any(other["decoder"]["embed"] != made["params"]["decoder"]["embed"])


def test_a_weight_of_another_shape_is_refused():
    wrong = {**WEIGHTS["decoder"], "embed": jnp.zeros((3, 3))}
    with pytest.raises(errors.ScopeParamShapeError, match="embed"):
        flax_modules.Decoder(TINY.decoder).apply({"params": wrong}, BATCH.tokens)


class Classifier(nn.Module):
    """Somebody else's module with the tower inside."""

    @nn.compact
    def __call__(self, tiles):
        features = flax_modules.VisionTower(TINY.vision, name="tower")(tiles)
        return nn.Dense(3)(features.mean(axis=1))


def test_as_a_part_of_other_flax_code():
    """Trains a classifier with Flax's TrainState, starting from the tower's weights."""
    model, labels = Classifier(), jnp.array([0, 2])
    start = model.init(jax.random.key(0), TILES)["params"]
    start = {**start, "tower": WEIGHTS["vision"]}
    state = train_state.TrainState.create(apply_fn=model.apply, params=start, tx=optax.adam(1e-2))

    @jax.jit
    def step(state):
        def value(p):
            logits = state.apply_fn({"params": p}, TILES)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, grads = jax.value_and_grad(value)(state.params)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(8):
        state, loss = step(state)
        losses.append(float(loss))
    assert losses[-1] < 0.3 * losses[0]


def test_as_an_nnx_module():
    module = nnx.bridge.ToNNX(flax_modules.VisionTower(TINY.vision), rngs=nnx.Rngs(0))
    nnx.bridge.lazy_init(module, TILES)
    weights = nnx.to_pure_dict(nnx.state(module, nnx.Param))
    expected = vision.encode(weights, TILES, TINY.vision, jnp.float32)
    np.testing.assert_allclose(module(TILES), expected, atol=1e-6)
