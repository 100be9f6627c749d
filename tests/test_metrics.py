"""Tests of the reading metrics."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bluelm_jax.evals import metrics

TEXTS = st.text(alphabet="0123", max_size=7)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("", "", 0),
        ("", "abc", 3),
        ("kitten", "sitting", 3),
        ("1234", "1234", 0),
        ("1234", "234", 1),
        ("1234", "1243", 2),
        ("flaw", "lawn", 2),
    ],
)
def test_edit_distance(first, second, expected):
    assert metrics.edit_distance(first, second) == expected


@settings(derandomize=True, deadline=None)
@given(TEXTS, TEXTS, TEXTS)
def test_edit_distance_is_a_metric(a, b, c):
    distance = metrics.edit_distance(a, b)
    assert distance == metrics.edit_distance(b, a)
    assert (distance == 0) == (a == b)
    assert abs(len(a) - len(b)) <= distance <= max(len(a), len(b))
    assert metrics.edit_distance(a, c) <= distance + metrics.edit_distance(b, c)


@pytest.mark.parametrize(
    ("prediction", "reference", "match", "accuracy"),
    [
        ("4839", "4839", 1.0, 1.0),
        (" 4839\n", "4839", 1.0, 1.0),
        ("4830", "4839", 0.0, 0.75),
        ("483", "4839", 0.0, 0.75),
        ("94839", "4839", 0.0, 0.75),
        ("", "4839", 0.0, 0.0),
        ("0000000000", "4839", 0.0, 0.0),
        ("", "", 1.0, 1.0),
        ("1", "", 0.0, 0.0),
    ],
)
def test_exact_match_and_character_accuracy(prediction, reference, match, accuracy):
    assert metrics.exact_match(prediction, reference) == match
    assert metrics.character_accuracy(prediction, reference) == accuracy
