"""Tests of the bootstrap."""

import numpy as np
import pytest

from experiments import statistics


def test_interval_of_a_share_is_near_the_normal_one():
    values = np.repeat([1.0, 0.0], [300, 200])
    interval = statistics.bootstrap_mean(values, num_resamples=20_000)
    half = 1.96 * np.sqrt(0.6 * 0.4 / 500)  # 0.0429
    assert interval["value"] == 0.6
    assert interval["low"] == pytest.approx(0.6 - half, abs=0.003)
    assert interval["high"] == pytest.approx(0.6 + half, abs=0.003)


def test_interval_covers_as_often_as_it_says():
    rng = np.random.default_rng(0)
    inside = 0
    for trial in range(300):
        values = rng.normal(3.0, 2.0, size=100)
        interval = statistics.bootstrap_mean(values, num_resamples=400, confidence=0.9, seed=trial)
        inside += interval["low"] <= 3.0 <= interval["high"]
    # Four standard deviations of 300 throws at 0.9 are 21.
    assert 249 <= inside <= 291


def test_seeds_are_averaged_image_by_image():
    values = np.array([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    expected = statistics.bootstrap_mean(np.array([0.5, 1.0, 0.5, 0.0]))
    assert statistics.bootstrap_mean(values) == expected


def test_same_seed_same_interval():
    values = np.random.default_rng(0).random(50)
    first = statistics.bootstrap_mean(values, seed=1)
    assert first == statistics.bootstrap_mean(values, seed=1)
    assert first != statistics.bootstrap_mean(values, seed=2)


def test_chunks_do_not_change_the_shape(monkeypatch):
    monkeypatch.setattr(statistics, "_CHUNK", 25)
    means = statistics._resampled_means(np.arange(10.0), 7, seed=0)
    assert means.shape == (7,)
    assert ((means >= 0) & (means <= 9)).all()
    assert len(set(means)) > 1


def test_pairing_narrows_the_difference():
    rng = np.random.default_rng(0)
    hardness = rng.normal(0.0, 1.0, size=400)
    first, second = hardness + 0.1, hardness + rng.normal(0.0, 0.05, size=400)
    paired = statistics.paired_bootstrap_difference(first, second)
    assert 0.0 < paired["low"] < paired["value"] < paired["high"]
    assert paired["value"] == pytest.approx((first - second).mean())
    assert paired["high"] - paired["low"] < 0.02
    assert statistics.bootstrap_mean(first)["high"] - statistics.bootstrap_mean(first)["low"] > 0.15


def test_difference_of_a_scheme_with_itself_is_zero():
    values = np.random.default_rng(0).random((2, 30))
    difference = statistics.paired_bootstrap_difference(values, values)
    assert difference == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_different_numbers_of_seeds():
    difference = statistics.paired_bootstrap_difference([[1, 1, 0], [1, 0, 0]], [0, 0, 0])
    assert difference["value"] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([], {}, "shape"),
        ([1.0, np.nan], {}, "finite"),
        ([1.0], {"confidence": 1.0}, "confidence 1.0"),
        ([1.0], {"num_resamples": 0}, "num_resamples 0"),
    ],
)
def test_bad_arguments(values, options, message):
    with pytest.raises(ValueError, match=message):
        statistics.bootstrap_mean(np.array(values), **options)


def test_difference_needs_the_same_images():
    with pytest.raises(ValueError, match="3 images against 2"):
        statistics.paired_bootstrap_difference([1, 2, 3], [1, 2])
