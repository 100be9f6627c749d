"""Speed of choosing grids over arrays of sizes, against the scalar loop, and their equality.

    python -m experiments.benchmarks.choose_grids
    python -m experiments.benchmarks.choose_grids --random_sizes=10000   (a quick look)

Checks every real size of the bundled list and a million random ones under every preset, then
prints nanoseconds a size for both forms, each the best of several runs on one core. About two
minutes. Exits with an error at the first difference.
"""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

import numpy as np
from absl import app, flags

import bluelm_jax
from bluelm_jax.aspect_ratio import choose_grid
from bluelm_jax.aspect_ratio_vectorized import choose_grids
from bluelm_jax.schemes import PRESETS, Tiling

_REAL_SIZES = pathlib.Path(bluelm_jax.__file__).parent / "data" / "assets" / "image_sizes.csv"


def _sizes(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Real sizes, and random ones of which half are uniform and half spread over magnitudes."""
    real = np.loadtxt(_REAL_SIZES, delimiter=",", skiprows=1, usecols=(0, 1), dtype=np.int64)
    rng = np.random.default_rng(0)
    uniform = rng.integers(1, 4001, (count // 2, 2))
    spread = np.exp(rng.uniform(0, np.log(20000), (count - count // 2, 2))).astype(np.int64)
    return real, np.concatenate([uniform, spread])


def _best_ns(run: Callable[[], object], sizes: int, repeats: int) -> float:
    """Nanoseconds a size of the fastest of `repeats` runs."""
    seconds = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return 1e9 * min(seconds) / sizes


def _check(name: str, tiling: Tiling, sizes: np.ndarray) -> None:
    found = choose_grids(sizes[:, 0], sizes[:, 1], tiling)
    expected = np.array([choose_grid(w, h, tiling) for w, h in sizes.tolist()])
    wrong = np.flatnonzero((found != expected).any(axis=1))
    if wrong.size:
        at = wrong[0]
        raise SystemExit(f"{name}: {sizes[at]}: scalar {expected[at]}, vectorised {found[at]}")


def main(argv: list[str]) -> None:
    """Runs the benchmark."""
    del argv
    real, random = _sizes(flags.FLAGS.random_sizes)
    sample, pairs = real[:1000], real[:1000].tolist()
    many = np.tile(real, (10, 1))
    print(f"real: {len(real):,} sizes, random: {len(random):,} sizes")
    print(f"{'preset':26}{'scalar ns':>10}{'array ns':>10}{'faster':>8}{'array, random ns':>18}")
    for name, tiling in PRESETS.items():
        _check(name, tiling, np.concatenate([real, random]))

        def scalar(tiling=tiling):
            return [choose_grid(w, h, tiling) for w, h in pairs]

        def array(sizes, tiling=tiling):
            return choose_grids(sizes[:, 0], sizes[:, 1], tiling)

        slow = _best_ns(scalar, len(sample), 5)
        fast = _best_ns(lambda run=array: run(many), len(many), 7)
        other = _best_ns(lambda run=array: run(random), len(random), 3)
        print(f"{name:26}{slow:10.0f}{fast:10.0f}{slow / fast:7.0f}x{other:18.0f}", flush=True)
    print("every choice equal")


if __name__ == "__main__":
    flags.DEFINE_integer("random_sizes", 1_000_000, "Random sizes to compare.", lower_bound=2)
    app.run(main)
