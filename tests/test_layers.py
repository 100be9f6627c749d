"""The shared arithmetic against NumPy, written from the formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bluelm_jax import layers, rotary
from bluelm_jax.params import Param


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) * scale, jnp.float32)


# Norms and linear ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
def test_layer_norm(shape):
    x, scale, bias = 2 + normal(*shape, scale=3.0), normal(6, seed=1), normal(6, seed=2)
    p = {"scale": scale, "bias": bias}
    got = layers.layer_norm(p, x, 1e-2)
    x, scale, bias = map(np.asarray, (x, scale, bias))
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    expected = (x - mean) / np.sqrt(var + 1e-2) * scale + bias
    np.testing.assert_allclose(got, expected, atol=1e-5)


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)])
def test_rms_norm(shape):
    x, scale = 2 + normal(*shape, scale=3.0), normal(6, seed=1)
    got = layers.rms_norm({"scale": scale}, x, 1e-2)
    x, scale = np.asarray(x), np.asarray(scale)
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-2) * scale
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_norms_run_in_float32():
    """In bfloat16 the mean of 256 + {0, 1, ...} would lose the differences."""
    x = jnp.array([[256.0, 258.0, 260.0, 262.0]], jnp.bfloat16)
    p = {"scale": jnp.ones(4), "bias": jnp.zeros(4)}
    y = layers.layer_norm(p, x, 1e-6)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y[0].astype(np.float32), [-1.342, -0.447, 0.447, 1.342], rtol=4e-3)
    r = layers.rms_norm({"scale": jnp.ones(4)}, jnp.full((1, 4), 1e30, jnp.bfloat16) / 1e15, 1e-6)
    np.testing.assert_allclose(r.astype(np.float32), 1.0)


def test_linear():
    x, kernel, bias = normal(2, 3, 4), normal(4, 5, seed=1), normal(5, seed=2)
    product = np.asarray(x) @ np.asarray(kernel)
    p = {"kernel": kernel}
    np.testing.assert_allclose(layers.linear(p, x), product, atol=1e-5)
    p["bias"] = bias
    np.testing.assert_allclose(layers.linear(p, x), product + np.asarray(bias), atol=1e-5)
    assert layers.linear(p, jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_linear_specs():
    specs = layers.linear_specs(4, 6, ("embed", "mlp"), gain=0.5)
    assert specs["kernel"] == Param((4, 6), ("embed", "mlp"), gain=0.5)
    assert specs["bias"] == Param((6,), ("mlp",), "zeros", decay=False)
    assert set(layers.linear_specs(4, 6, ("embed", "mlp"), bias=False)) == {"kernel"}


def test_activations():
    x = np.linspace(-4, 4, 41, dtype=np.float32)
    tanh_gelu = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    np.testing.assert_allclose(layers.activation("gelu")(x), tanh_gelu, atol=1e-6)
    np.testing.assert_allclose(layers.activation("silu")(x), x / (1 + np.exp(-x)), atol=1e-6)
    with pytest.raises(KeyError):
        layers.activation("relu")


# RoPE ------------------------------------------------------------------------------------------------


def rotate(x, positions, theta):
    """Rotates the pair (x[i], x[i + H/2]) by position * theta^(-2i/H), as complex numbers."""
    half = x.shape[-1] // 2
    frequency = theta ** (-2.0 * np.arange(half) / x.shape[-1])
    turn = np.exp(1j * positions[..., None, None] * frequency)
    z = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([z.real, z.imag], -1)


def rope(x, positions, theta=10_000.0):
    tables = layers.rope_tables(jnp.asarray(positions, jnp.int32), x.shape[-1], theta)
    return layers.apply_rope(x, *tables)


@pytest.mark.parametrize("theta", [100.0, 10_000.0])
@pytest.mark.parametrize("head_dim", [2, 8, 10])
def test_rope_is_a_complex_rotation(theta, head_dim):
    x = normal(2, 5, 3, head_dim)
    positions = np.array([[0, 1, 2, 3, 4], [7, 0, 100, 4, 511]])
    expected = rotate(np.asarray(x, np.float64), positions, theta)
    np.testing.assert_allclose(rope(x, positions, theta), expected, atol=1e-4)


@pytest.mark.parametrize("factor", [72**-0.5, 1.4 / 40**0.5])
def test_scaled_does_not_round_the_factor(factor):
    """In bfloat16 the product is rounded, as it must be; the factor is not."""
    x = normal(64).astype(jnp.bfloat16)
    exact = np.asarray(x, np.float64) * factor
    got = np.asarray(layers.scaled(x, factor), np.float64)
    np.testing.assert_allclose(got, exact, rtol=2**-8)
    assert abs((got / exact).mean() - 1) < 4e-4 < abs((np.asarray(x * factor) / exact).mean() - 1)
    assert layers.scaled(x, factor).dtype == jnp.bfloat16


def test_rope_frequencies_stay_exact_far_out():
    """Within the roundings of exponent, power and inverse of the real numbers, for wide heads."""
    for head_dim in (64, 72, 128):
        exact = 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
        got = rotary.rope_frequencies(head_dim, 10_000.0)
        assert got.dtype == np.float32 and got[0] == 1
        np.testing.assert_allclose(got, exact, rtol=5e-7)


def test_rope_tables_by_hand():
    cos, sin = layers.rope_tables(jnp.array([[2]]), 4, 100.0)  # Frequencies 1 and 0.1.
    np.testing.assert_allclose(cos[0, 0], np.cos([2, 0.2, 2, 0.2]), atol=1e-6)
    np.testing.assert_allclose(sin[0, 0], np.sin([-2, -0.2, 2, 0.2]), atol=1e-6)


@settings(max_examples=10)
@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 200))
def test_scores_depend_on_relative_positions_only(a, b, shift):
    q, k = normal(1, 1, 1, 8), normal(1, 1, 1, 8, seed=1)

    def score(at_q, at_k):
        return float((rope(q, [[at_q]]) * rope(k, [[at_k]])).sum())

    assert score(a, b) == pytest.approx(score(a + shift, b + shift), abs=2e-3)


def test_scores_do_depend_on_relative_positions():
    q = normal(1, 1, 1, 8)
    same, apart = (float((rope(q, [[0]]) * rope(q, [[n]])).sum()) for n in (0, 3))
    assert same > apart + 0.1
    np.testing.assert_allclose(np.linalg.norm(rope(q, [[17]])), np.linalg.norm(q), rtol=1e-5)


# Attention -------------------------------------------------------------------------------------------


def attention_by_loops(q, k, v, mask):
    """One query head of one row at a time."""
    q, k, v, mask = map(np.asarray, (q, k, v, mask))
    out = np.zeros_like(q)
    per_group = q.shape[2] // k.shape[2]
    for b, t, n in np.ndindex(q.shape[:3]):
        keys, values = k[b, :, n // per_group], v[b, :, n // per_group]
        scores = keys @ q[b, t, n] / np.sqrt(q.shape[-1])
        scores = np.exp(scores - scores.max()) * mask[b, t]
        out[b, t, n] = (scores / scores.sum()) @ values
    return out


@pytest.mark.parametrize(("heads", "kv"), [(4, 4), (4, 2), (6, 2), (4, 1)])
def test_attention_with_grouped_heads(heads, kv):
    q, k, v = (normal(2, 5, n, 8, seed=i, scale=2.0) for i, n in enumerate((heads, kv, kv)))
    mask = np.random.default_rng(3).random((2, 5, 5)) < 0.6
    mask |= np.eye(5, dtype=bool)  # Nothing is left without a key.
    got = layers.attention(q, k, v, jnp.array(mask))
    np.testing.assert_allclose(got, attention_by_loops(q, k, v, mask), atol=1e-5)


def test_attention_without_mask_and_with_other_key_length():
    q, k, v = normal(2, 3, 4, 8), normal(2, 7, 2, 8, seed=1), normal(2, 7, 2, 8, seed=2)
    expected = attention_by_loops(q, k, v, np.ones((2, 3, 7)))
    np.testing.assert_allclose(layers.attention(q, k, v), expected, atol=1e-5)


def test_masked_keys_have_no_influence_at_all():
    q, k, v = (normal(1, 4, 2, 8, seed=i) for i in range(3))
    mask = jnp.tril(jnp.ones((1, 4, 4), bool))

    def first(k, v):
        return layers.attention(q, k, v, mask)[:, :2].sum()

    grad_k, grad_v = jax.grad(first, (0, 1))(k, v)
    assert np.abs(grad_k[:, :2]).min() > 0 and np.abs(grad_v[:, :2]).min() > 0
    assert not grad_k[:, 2:].any() and not grad_v[:, 2:].any()


def test_a_row_with_nothing_to_attend_to_stays_finite():
    q, k, v = (normal(1, 3, 2, 8, seed=i) for i in range(3))
    mask = jnp.zeros((1, 3, 3), bool)
    out, grads = jax.value_and_grad(lambda q: layers.attention(q, k, v, mask).sum())(q)
    assert np.isfinite(out) and np.isfinite(grads).all()


def test_scores_are_float32_in_bfloat16():
    """Two keys whose scores differ by less than bfloat16 resolves at that size."""
    q = jnp.full((1, 1, 1, 4), 16.0, jnp.bfloat16)
    k = jnp.array([[16.0] * 4, [16.0] * 3 + [16.125]], jnp.bfloat16).reshape(1, 2, 1, 4)
    v = jnp.array([[0.0] * 4, [1.0] * 4], jnp.bfloat16).reshape(1, 2, 1, 4)
    # Scores 512 and 513: in bfloat16 both would be 512 and the answer 0.5.
    got = layers.attention(q, k, v)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(got.astype(np.float32), 1 / (1 + np.exp(-1)), rtol=1e-2)


def test_expand():
    assert layers.expand(jnp.ones(3), 3).shape == (1, 1, 3)
    assert layers.expand(jnp.ones((2, 3)), 2).shape == (2, 3)
