"""The converters of `tests.real_weights`, on numbers small enough to follow."""

import jax.numpy as jnp
import numpy as np

from bluelm_jax import layers
from tests import real_weights


def test_rotated_pairs_become_rotated_halves():
    """Scores of rotated queries and keys are the same in both orders of a head's rows.

    GGUF's Llama rotates neighbouring rows (2i, 2i + 1), ours row i with row i + H / 2.
    """
    rng = np.random.default_rng(0)
    heads, width, head_dim, length = 3, 5, 8, 4
    pairs = rng.normal(size=(2, heads * head_dim, width)).astype(np.float32)
    x = rng.normal(size=(length, width)).astype(np.float32)
    angle = np.arange(length)[:, None] * 100.0 ** (-2 * np.arange(head_dim // 2) / head_dim)
    turned = []
    for weight in pairs:
        y = (x @ weight.T).reshape(length, heads, head_dim // 2, 2)
        z = (y[..., 0] + 1j * y[..., 1]) * np.exp(1j * angle)[:, None]
        turned.append(np.stack([z.real, z.imag], -1).reshape(length, heads, head_dim))
    tables = layers.rope_tables(jnp.arange(length)[None], head_dim, 100.0)
    ours = []
    for weight in pairs:
        y = x @ real_weights._rotating_halves(weight, heads).T
        y = jnp.asarray(y.reshape(1, length, heads, head_dim))
        ours.append(np.asarray(layers.apply_rope(y, *tables))[0])
    score = "tnh,snh->nts"
    np.testing.assert_allclose(
        np.einsum(score, *ours), np.einsum(score, *turned), rtol=2e-4, atol=2e-4
    )


def test_packages_that_are_missing_are_named():
    assert real_weights.missing(("numpy", "no_such_package")) == ["no_such_package"]
