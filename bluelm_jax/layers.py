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
from jaxtyping import Array, Bool, Float, Int

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
    """x @ kernel (+ bias).

    Leading dimensions are merged first: the weight gradient then contracts one axis, which XLA on
    the CPU does 1.7 times as fast as contracting two (experiments/benchmarks/linear_gradient.py).
    """
    kernel = p["kernel"].astype(x.dtype)
    y = x.reshape(-1, x.shape[-1]) @ kernel
    if "bias" in p:
        y = y + p["bias"].astype(x.dtype)[None]
    return y.reshape(*x.shape[:-1], kernel.shape[1])


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
    return {"gelu": lambda x: jax.nn.gelu(x, approximate=True), "silu": jax.nn.silu}[name]


def rope_tables(
    positions: Int[Array, "*B"], head_dim: int, theta: float
) -> tuple[Float[Array, "*B H"], Float[Array, "*B H"]]:
    """cos and sin of position * theta^(-2i/H), each half repeated (Su et al. 2021).

    The sine table carries the sign of the rotated half, [-sin, sin], so applying it needs no
    negation (which the NPU compiler does not take).
    """
    half = jnp.arange(head_dim // 2, dtype=jnp.float32)
    frequency = theta ** (-2.0 * half / head_dim)
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
    t, kv, h = q.shape[1], k.shape[2], q.shape[3]
    # Heads first and groups folded into rows: both products are plain batched matmuls.
    q = rearrange(q, "b t (k g) h -> b k (g t) h", k=kv) * h**-0.5
    k, v = (rearrange(x, "b c k h -> b k c h") for x in (k, v))
    scores = jnp.einsum("bkth,bkch->bktc", q, k, preferred_element_type=jnp.float32)
    if mask is not None:
        grouped = rearrange(scores, "b k (g t) c -> b k g t c", t=t)
        grouped = jnp.where(mask[:, None, None], grouped, MASKED)
        scores = grouped.reshape(scores.shape)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    out = jnp.einsum("bktc,bkch->bkth", weights, v)
    return rearrange(out, "b k (g t) h -> b t (k g) h", t=t)
