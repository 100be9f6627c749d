"""What conftest.py promises; without these, the suite could stop being strict unnoticed."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from bluelm_jax import batch, layers

NORM = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}


def test_eight_cpu_devices():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8


def test_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank"):
        jnp.ones((2, 3)) + jnp.ones(3)


def test_warnings_are_errors():
    with pytest.raises(UserWarning, match="heard"):
        warnings.warn("heard", stacklevel=1)


def test_annotations_are_checked():
    assert layers.layer_norm(NORM, jnp.ones((2, 4)), eps=1e-6).shape == (2, 4)
    assert layers.layer_norm(NORM, jnp.ones((2, 4)), eps=1).shape == (2, 4)  # An int for a float.
    with pytest.raises(TypeCheckError):
        layers.layer_norm(NORM, jnp.ones((2, 4), jnp.int32), eps=1e-6)
    with pytest.raises(TypeCheckError):
        layers.layer_norm(NORM, jnp.ones((2, 4)), eps="1e-6")


def test_pytrees_take_what_jax_puts_in_them():
    names = ("tokens", "loss_weights", "positions", "segments", "image_index", "tiles")
    shapes = batch.Batch(**{name: jax.ShapeDtypeStruct((2,), "int32") for name in names})
    assert jax.tree.map(lambda leaf: leaf.shape, shapes).tokens == (2,)
