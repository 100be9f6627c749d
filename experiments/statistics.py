"""Percentile bootstrap over held-out images.

Resampling images answers: how far would the figure move on other images of the same kind? It says
nothing about another training seed; report the number of seeds beside every interval.

B. Efron and R. Tibshirani, An Introduction to the Bootstrap (1993), ch. 13 (percentile interval).
"""

from typing import TypedDict

import numpy as np

# Resampled values held at once, so that memory stays near 32 MB whatever the sample size.
_CHUNK = 4_000_000


class Interval(TypedDict):
    """An estimate with its confidence bounds."""

    value: float
    low: float
    high: float


def _resampled_means(values: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """Means of `num_resamples` samples drawn from `values` [n] with replacement."""
    rng = np.random.default_rng(seed)
    at_once = max(1, _CHUNK // len(values))
    means = []
    for start in range(0, num_resamples, at_once):
        rows = min(at_once, num_resamples - start)
        means.append(values[rng.integers(len(values), size=(rows, len(values)))].mean(axis=1))
    return np.concatenate(means)


def bootstrap_mean(
    values: np.ndarray,
    *,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Returns the mean with its percentile bootstrap interval over images.

    Where every value is the same (no image read, or all) the interval has no width; that is a
    limit of the bootstrap, not certainty.

    Args:
      values: [n], one value an image, or [R, n] for R training seeds over the same images; the
        seeds are averaged image by image before images are resampled.
      num_resamples: bootstrap samples.
      confidence: share of the bootstrap means inside the interval.
      seed: of the resampling.

    Raises:
      ValueError: if there is no value, one is not finite, or `confidence` is not inside (0, 1).
    """
    values = np.asarray(values, np.float64)
    if values.ndim not in (1, 2) or values.size == 0:
        raise ValueError(f"values of shape {values.shape}: expected [n] or [R, n], not empty")
    if not np.isfinite(values).all():
        raise ValueError("values: all must be finite")
    if not 0.0 < confidence < 1.0 or num_resamples < 1:
        raise ValueError(
            f"confidence {confidence} must lie inside (0, 1), num_resamples {num_resamples} be >= 1"
        )
    if values.ndim == 2:
        values = values.mean(axis=0)
    means = _resampled_means(values, num_resamples, seed)
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value=float(values.mean()), low=float(low), high=float(high))


def paired_bootstrap_difference(
    first: np.ndarray,
    second: np.ndarray,
    *,
    num_resamples: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Returns mean(first - second) with its interval; both are resampled by the same images.

    Args:
      first: [n] or [R, n], as for `bootstrap_mean`.
      second: the same images in the same order; another number of seeds is allowed.
      num_resamples: bootstrap samples.
      confidence: share of the bootstrap means inside the interval.
      seed: of the resampling.

    Raises:
      ValueError: if the numbers of images differ, or as for `bootstrap_mean`.
    """
    means = [np.atleast_2d(np.asarray(v, np.float64)).mean(axis=0) for v in (first, second)]
    if means[0].shape != means[1].shape:
        raise ValueError(f"{means[0].size} images against {means[1].size}: they must be the same")
    return bootstrap_mean(
        means[0] - means[1], num_resamples=num_resamples, confidence=confidence, seed=seed
    )
