"""Repetition penalty, stop bans and their bounds."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bluelm_jax import sampling
from bluelm_jax.sampling import SamplingConfig


def test_penalty_by_hand():
    """Positive logits are divided, negative ones multiplied, zero and unseen ones stay."""
    scores = jnp.array([[2.0, -2.0, 0.0, 2.0, -2.0]])
    seen = jnp.array([[True, True, True, False, False]])
    got = sampling.penalise(scores, seen, 2.0)
    assert got.tolist() == [[1.0, -4.0, 0.0, 2.0, -2.0]]


def test_penalty_below_one_rewards_repetition():
    got = sampling.penalise(jnp.array([[1.0, -1.0]]), jnp.array([[True, True]]), 0.5)
    assert got.tolist() == [[2.0, -0.5]]


def test_seen_counts_only_the_places_that_count():
    nothing = jnp.zeros((2, 6), bool)
    tokens = jnp.array([[1, 2, 5], [3, 3, 0]])
    counts = jnp.array([[True, False, True], [True, True, False]])
    got = sampling.mark_seen(nothing, tokens, counts)
    assert [np.flatnonzero(row).tolist() for row in np.asarray(got)] == [[1, 5], [3]]
    more = sampling.mark_seen(got, jnp.array([[0], [0]]), jnp.array([[True], [False]]))
    assert [np.flatnonzero(row).tolist() for row in np.asarray(more)] == [[0, 1, 5], [3]]


@pytest.mark.parametrize("when", [True, False])
def test_forbidden_tokens(when):
    scores = jnp.array([[1.0, 2.0, 3.0]])
    got = sampling.forbid(scores, (2, 0), jnp.array(when))
    assert np.isneginf(got[0]).tolist() == ([True, False, True] if when else [False] * 3)


def test_greedy_after_the_penalty_takes_another_token():
    scores, seen = jnp.array([[3.0, 2.0]]), jnp.array([[True, False]])
    how = SamplingConfig(repetition_penalty=2.0)
    chosen = sampling.choose(sampling.penalise(scores, seen, 2.0), jax.random.key(0), how)
    assert chosen.tolist() == [1]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"min_new_tokens": -1}, "min_new_tokens = -1: must be in 0..64"),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens = 9: must be in 0..8"),
        ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0: must be > 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty = inf: must be > 0"),
        ({"temperature": float("nan")}, "temperature = nan: must be 0, or finite and >= 1e-06"),
        ({"temperature": 1e-30}, "temperature = 1e-30: must be 0, or finite and >= 1e-06"),
        ({"max_new_tokens": 2.5}, "max_new_tokens = 2.5: must be an integer"),
        ({"top_k": True}, "top_k = True: must be an integer"),
    ],
)
def test_bounds(fields, message):
    with pytest.raises(ValueError, match=message.replace(".", r"\.")):
        SamplingConfig(**fields)


def test_numpy_integers_count_and_compare():
    assert SamplingConfig(top_k=np.int32(5)) == SamplingConfig(top_k=5)  # pyright: ignore


def kept(scores, **fields):
    """Which tokens are ever drawn from a row, over enough draws of a few tokens."""
    rows = jnp.tile(jnp.array([scores]), (400, 1))
    how = SamplingConfig(temperature=1.0, **fields)
    return sorted({int(t) for t in sampling.choose(rows, jax.random.key(0), how)})


@pytest.mark.parametrize(
    ("scores", "fields", "expected"),
    [
        ([1.0] * 8, {"top_p": 0.5}, [4, 5, 6, 7]),  # By rank: not all that tie.
        ([1.0] * 8, {"top_p": 0.05}, [7]),
        ([3.0, 0.0, 0.0, 0.0], {"top_p": 0.9}, [0, 3]),  # 0.87 + 0.04 reaches 0.9.
        ([0.0, 2.0, 1.0, -9.0], {"top_p": 0.99}, [0, 1, 2]),
        ([2.0, 1.0, 1.0, 1.0, 0.0], {"top_k": 2}, [0, 1, 2, 3]),  # By value: all that tie.
        ([1.0] * 8, {"top_k": 2, "top_p": 0.5}, [4, 5, 6, 7]),
    ],
)
def test_ties_are_cut_as_in_transformers(scores, fields, expected):
    assert kept(scores, **fields) == expected
