"""Weights laid out for decoding: the same numbers, so that a step reads each of them once.

A step of one token a row is bound by reading the weights. Three things cost beside that on a CPU,
and `prepare` removes them once for all steps: a scan copies each block's slice of the stacked
weights before it multiplies; q, k, v and gate, up are five products where two do; and which layout
multiplies fastest depends on the number of rows (experiments/benchmarks/generation.py prints what
each is worth).
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from bluelm_jax import config
from bluelm_jax.params import Tree


def prepare(p: Tree, cfg: config.DecoderConfig, *, rows: int, dtype: DTypeLike) -> Tree:
    """The decoder's weights with "blocks" as a tuple of blocks, for `decoder.extend`.

    The result is a copy of the blocks; embeddings and head are shared with `p`. A tree that is
    prepared already comes back as it is.

    Args:
      p: the decoder's weights, as `decoder.specs` declares them.
      cfg: the decoder.
      rows: rows that are decoded together. One row keeps kernels [in, out]; for more they are
        transposed. Both forms give right results for any number of rows.
      dtype: dtype of the activations, to which kernels and biases are cast here instead of at every
        step. Norm scales stay as stored: `layers.rms_norm` multiplies by them in float32.
    """
    if is_prepared(p):
        return p
    block = functools.partial(_block, transposed=rows > 1, dtype=jnp.dtype(dtype))
    return {**p, "blocks": tuple(block(p["blocks"], jnp.int32(i)) for i in range(cfg.depth))}


def is_prepared(p: Tree) -> bool:
    """Whether the decoder's weights are those of `prepare`."""
    return isinstance(p["blocks"], tuple)


@functools.partial(jax.jit, static_argnames=("transposed", "dtype"))
def _block(blocks: Tree, index: Int[Array, ""], *, transposed: bool, dtype: jnp.dtype) -> Tree:
    w = jax.tree.map(lambda stacked: stacked[index], blocks)
    attn, mlp = (jax.tree.map(lambda x: x.astype(dtype), w[part]) for part in ("attn", "mlp"))

    def fused(*parts: Tree) -> Tree:
        joined = {k: jnp.concatenate([part[k] for part in parts], axis=-1) for k in parts[0]}
        if transposed:
            joined["rows"] = joined.pop("kernel").T
        return joined

    return {
        "norm1": w["norm1"],
        "attn": {"qkv": fused(attn["q"], attn["k"], attn["v"]), "out": fused(attn["out"])},
        "norm2": w["norm2"],
        "mlp": {"gate_up": fused(mlp["gate"], mlp["up"]), "down": fused(mlp["down"])},
    }
