"""What the graphs are made of: signatures, models, weights in their exported form."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from bluelm_jax.params import Tree


@dataclasses.dataclass(frozen=True, eq=False)
class Signature:
    """One entry point of a model file.

    Attributes:
      name: signature key in the file.
      fn: fn(weights, **inputs) -> dict of outputs.
      inputs: name -> shape and dtype.
    """

    name: str
    fn: Callable[..., dict[str, Array]]
    inputs: Mapping[str, jax.ShapeDtypeStruct]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """One .tflite file: weights (NumPy, float32) and the signatures that share them."""

    name: str
    weights: Tree
    signatures: tuple[Signature, ...]


def struct(shape: tuple[int, ...], dtype: str = "float32") -> jax.ShapeDtypeStruct:
    """Shape and dtype of an input."""
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def to_numpy(w: Array) -> np.ndarray:
    """A weight in host memory, float32."""
    return np.asarray(w, np.float32)


def linear_weights(p: Tree, scale: float = 1.0) -> Tree:
    """Turns kernel [in, out] into weight [out, in], with it and the bias times `scale`."""
    weights = {"weight": np.ascontiguousarray(to_numpy(p["kernel"]).T) * np.float32(scale)}
    if "bias" in p:
        weights["bias"] = to_numpy(p["bias"]) * np.float32(scale)
    return weights


def unstack(blocks: Tree, depth: int) -> list[Tree]:
    """The first `depth` blocks of a stacked tree, one by one."""
    return [jax.tree.map(operator.itemgetter(i), blocks) for i in range(depth)]


def norm_weights(p: Tree, scale: float = 1.0) -> Tree:
    """Scale and bias of a norm, times `scale`."""
    return {name: to_numpy(w) * np.float32(scale) for name, w in p.items()}


def linear(p: Tree, name: str, x: Float[Array, "R A"]) -> Float[Array, "R Z"]:
    """Computes x @ weight^T (+ bias) of layer `name`: FULLY_CONNECTED, no TRANSPOSE of weights.

    The name reaches the file's tensors, and the quantiser's recipes select layers by it.
    """
    with jax.named_scope(name):
        y = jnp.einsum("ri,oi->ro", x, p[name]["weight"])
        return y + p[name]["bias"][None] if "bias" in p[name] else y
