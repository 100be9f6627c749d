"""Gradient of a linear layer on [I, P, D] activations: leading dimensions merged, or left as they are.

    python -m experiments.benchmarks.linear_gradient

Prints CPU milliseconds of both forms and their ratio, at the sizes of the quickstart's ViT. It is why
`layers.linear` merges them: the weight gradient then contracts one axis instead of two.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from absl import app

TILES, PATCHES, WIDTHS = 48, 64, (96, 192)


def cpu_ms(f: Callable[[], object], repeats: int = 40) -> float:
    """CPU milliseconds of a call, after one that compiles."""
    jax.block_until_ready(f())
    start = time.process_time()
    for _ in range(repeats):
        jax.block_until_ready(f())
    return (time.process_time() - start) / repeats * 1e3


def main(_: list[str]) -> None:
    """Times both forms in turn, five rounds, and prints the least of each."""
    x = jax.random.normal(jax.random.key(0), (TILES, PATCHES, WIDTHS[0]))
    w = jax.random.normal(jax.random.key(1), WIDTHS)

    def left(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.square(x @ w).sum()

    def merged(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.square(x.reshape(-1, x.shape[-1]) @ w).sum()

    grads = [jax.jit(jax.grad(f, argnums=(0, 1))) for f in (left, merged)]
    rounds = [[cpu_ms(lambda g=g: g(x, w)) for g in grads] for _ in range(5)]
    best = [min(column) for column in zip(*rounds, strict=True)]
    print(
        f"left as they are {best[0]:.2f} ms, merged {best[1]:.2f} ms, ratio {best[0] / best[1]:.2f}"
    )


if __name__ == "__main__":
    app.run(main)
