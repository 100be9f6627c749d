"""The arithmetic that the vision tower and the decoder share.

Functions take a weight dict and an activation. Weights are cast to the activation's dtype where
they are used; norms and softmax run in float32. Residual streams may be [B, L, D] or, at export,
[L, D], so everything here works on any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from bluelm_jax import rotary
from bluelm_jax.params import Param, Tree

# Score of a masked pair. Finite, so that a row with nothing to attend to stays finite. (The exported
# graph adds about -100 instead: there the size of the mask sets the int16 scale of the scores.)
MASKED = -1e30


def expand(v: Array, ndim: int) -> Array:
    """Puts unit dimensions before `v` so that it broadcasts against `ndim` dimensions."""
    return v.reshape((1,) * (ndim - v.ndim) + v.shape)


def linear_specs(
    din: int,
    dout: int,
    axes: tuple[str | None, str | None],
    *,
    bias: bool = True,
    gain: float = 1.0,
) -> Tree:
    """Kernel [din, dout] and, unless told otherwise, a zero bias [dout]."""
    specs = {"kernel": Param((din, dout), axes, gain=gain)}
    if bias:
        specs["bias"] = Param((dout,), (axes[1],), "zeros", decay=False)
    return specs


def linear(p: Tree, x: Float[Array, "*B A"]) -> Float[Array, "*B Z"]:
    """x @ kernel (+ bias), or x @ rows^T for a weight laid out for decoding.

    Leading dimensions are merged first: the weight gradient then contracts one axis, which XLA on
    the CPU does 1.7 times as fast as contracting two (experiments/benchmarks/linear_gradient.py).
    """
    flat = x.reshape(-1, x.shape[-1])
    if "rows" in p:
        y = rows_product(p["rows"].astype(x.dtype), flat, x.dtype)
    else:
        y = flat @ p["kernel"].astype(x.dtype)
    if "bias" in p:
        y = y + p["bias"].astype(x.dtype)[None]
    return y.reshape(*x.shape[:-1], y.shape[1])


def rows_product(
    rows: Float[Array, "Z A"], x: Float[Array, "M A"], dtype: DTypeLike
) -> Float[Array, "M Z"]:
    """x @ rows^T, for a weight that is kept transposed.

    With a few rows of x, XLA on the CPU multiplies fastest with the weight on the left. The barrier
    keeps it from turning that product round again (experiments/benchmarks/generation.py).
    """
    contract = (((1,), (1,)), ((), ()))
    if x.shape[0] == 1:
        return jax.lax.dot_general(x, rows, contract, preferred_element_type=dtype)
    y = jax.lax.dot_general(rows, x, contract, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(y).T


def layer_norm_specs(width: int, axis: str) -> Tree:
    """Scale and bias [width]."""
    return {
        "scale": Param((width,), (axis,), "ones", decay=False),
        "bias": Param((width,), (axis,), "zeros", decay=False),
    }


def layer_norm(p: Tree, x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B D"]:
    """LayerNorm over the last axis, in float32."""
    y = x.astype(jnp.float32)
    y = y - y.mean(-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    y = y * expand(p["scale"].astype(jnp.float32), y.ndim)
    return (y + expand(p["bias"].astype(jnp.float32), y.ndim)).astype(x.dtype)


def rms_norm_specs(width: int, axis: str) -> Tree:
    """Scale [width]."""
    return {"scale": Param((width,), (axis,), "ones", decay=False)}


def rms_norm(p: Tree, x: Float[Array, "*B D"], eps: float) -> Float[Array, "*B D"]:
    """RMSNorm over the last axis, in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + eps)
    return (y * expand(p["scale"].astype(jnp.float32), y.ndim)).astype(x.dtype)


def activation(name: str) -> Callable[[Array], Array]:
    """'gelu' is the tanh form, the one SigLIP uses and TFLite has an operator for."""
    return {
        "gelu": lambda x: jax.nn.gelu(x, approximate=True),
        "gelu_exact": lambda x: jax.nn.gelu(x, approximate=False),
        "silu": jax.nn.silu,
    }[name]


def scaled(x: Float[Array, "*B"], factor: float) -> Float[Array, "*B"]:
    """x * factor, rounded once.

    A Python number next to a bfloat16 array is itself rounded to bfloat16 first: 1 / sqrt(72) and
    1.4 / sqrt(40) would be off by 1.5e-3 everywhere.
    """
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def rope_tables(
    positions: Int[Array, "*B"], head_dim: int, theta: float
) -> tuple[Float[Array, "*B H"], Float[Array, "*B H"]]:
    """cos and sin of position * theta^(-2i/H), each half repeated (Su et al. 2021).

    The sine table carries the sign of the rotated half, [-sin, sin], so applying it needs no
    negation (which the NPU compiler does not take).
    """
    frequency = jnp.asarray(rotary.rope_frequencies(head_dim, theta))
    angle = positions[..., None].astype(jnp.float32) * expand(frequency, positions.ndim + 1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([cos, cos], -1), jnp.concatenate([-sin, sin], -1)


def apply_rope(
    x: Float[Array, "B L N H"], cos: Float[Array, "B L H"], sin: Float[Array, "B L H"]
) -> Float[Array, "B L N H"]:
    """Rotates halves: [a, b] -> [a cos - b sin, b cos + a sin]."""
    a, b = jnp.split(x, 2, axis=-1)
    swapped = jnp.concatenate([b, a], -1)
    return x * cos[:, :, None].astype(x.dtype) + swapped * sin[:, :, None].astype(x.dtype)


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B C K H"],
    v: Float[Array, "B C K H"],
    mask: Bool[Array, "B T C"] | None = None,
) -> Float[Array, "B T N H"]:
    """softmax(q k^T / sqrt(H)) v with grouped heads (query head n reads key head n // (N / K)).

    Args:
      mask: True where a query may attend; None attends everywhere.
    """
    k, v = (rearrange(x, "b c k h -> b k c h") for x in (k, v))
    return heads_attention(q, k, v, mask)


def heads_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K C H"],
    v: Float[Array, "B K C H"],
    mask: Bool[Array, "B T C"] | None = None,
) -> Float[Array, "B T N H"]:
    """`attention` with the heads of keys and values first, as a cache holds them."""
    t, kv, h = q.shape[1], k.shape[1], q.shape[3]
    # Heads first and groups folded into rows: both products are plain batched matmuls.
    q = scaled(rearrange(q, "b t (k g) h -> b k (g t) h", k=kv), h**-0.5)
    scores = jnp.einsum("bkth,bkch->bktc", q, k, preferred_element_type=jnp.float32)
    if mask is not None:
        grouped = rearrange(scores, "b k (g t) c -> b k g t c", t=t)
        grouped = jnp.where(mask[:, None, None], grouped, MASKED)
        scores = grouped.reshape(scores.shape)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bktc,bkch->bkth", weights, v)
    return rearrange(out, "b k (g t) h -> b t (k g) h", t=t)


def packed_mask(
    segments: Int[Array, "B C"], start: int = 0, stop: int | None = None
) -> Bool[Array, "B T C"]:
    """Which of the row's positions the queries start..stop (default: all) may attend to.

    Those of the same segment that are not later. A segment's positions are neighbours and in order,
    so the order of the row is the order within each segment.
    """
    queries = segments[:, start:stop]
    same = queries[:, :, None] == segments[:, None, :]
    order = start + jnp.arange(queries.shape[1])[:, None] >= jnp.arange(segments.shape[1])[None]
    return same & order[None]


def packed_attention(
    q: Float[Array, "B L N H"],
    k: Float[Array, "B L K H"],
    v: Float[Array, "B L K H"],
    segments: Int[Array, "B L"],
    block: int = 0,
) -> Float[Array, "B L N H"]:
    """Attention of whole packed rows, causal inside each segment.

    Args:
      block: queries whose scores exist at one time; 0 takes all. A block attends to the keys up to
        its own end, so about half of all scores are never computed. Its scores are computed again in
        the backward pass instead of being kept, so float32 [B, N, L, L] never exists: the largest
        array is [B, N, block, L].
    """
    length = q.shape[1]
    if not 0 < block < length:
        return attention(q, k, v, packed_mask(segments))

    def attend(start: int, stop: int) -> Array:
        @jax.checkpoint
        def one(q: Array, k: Array, v: Array, segments: Array) -> Array:
            return attention(q, k, v, packed_mask(segments, start, stop))

        return one(q[:, start:stop], k[:, :stop], v[:, :stop], segments[:, :stop])

    starts = range(0, length, block)
    return jnp.concatenate([attend(s, min(s + block, length)) for s in starts], axis=1)
