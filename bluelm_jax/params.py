"""One declaration per weight, from which everything about it follows.

`specs` functions of the modules return nested dicts of `Param`. The same tree gives initial values,
shapes for the compiler, shardings, parameter counts, restore targets and weight-decay masks, so none
of these can disagree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from bluelm_jax import sharding

Tree = Any  # a nested dict of arrays, Params or scalars


@dataclasses.dataclass(frozen=True)
class Param:
    """Declaration of one weight.

    Attributes:
      shape: full shape, stacked blocks on the leading axis.
      axes: logical axis of each dimension (see sharding.RULES).
      scale: 'fan_in' is a truncated normal of variance 1 / fan_in (the product of all dimensions
        but the last and the 'layers' axis); a number is that standard deviation; 'zeros', 'ones'.
      gain: factor on the fan_in standard deviation.
      decay: whether weight decay applies.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    scale: str | float = "fan_in"
    gain: float = 1.0
    decay: bool = True

    def __post_init__(self):
        if len(self.shape) != len(self.axes):
            raise ValueError(f"shape {self.shape} and axes {self.axes} differ in length")
        sharding.partition_spec(self.axes)

    def std(self) -> float:
        """Standard deviation of the initial values."""
        if not isinstance(self.scale, str):
            return self.scale
        dims = [n for n, a in zip(self.shape, self.axes, strict=True) if a != "layers"]
        return self.gain / math.sqrt(math.prod(dims[:-1]))


def is_param(x: object) -> bool:
    """True for the leaves of a spec tree."""
    return isinstance(x, Param)


def map_params(f: Callable[..., Any], specs: Tree, *rest: Tree) -> Tree:
    """`jax.tree.map` over spec trees (Params are leaves)."""
    return jax.tree.map(f, specs, *rest, is_leaf=is_param)


def stack(specs: Tree, depth: int) -> Tree:
    """Adds a leading 'layers' axis of size `depth` to every weight of one block."""
    return map_params(
        lambda p: dataclasses.replace(p, shape=(depth, *p.shape), axes=("layers", *p.axes)), specs
    )


def _init_one(key: jax.Array, p: Param, dtype: DTypeLike) -> jax.Array:
    if p.scale == "zeros":
        return jnp.zeros(p.shape, dtype)
    if p.scale == "ones":
        return jnp.ones(p.shape, dtype)
    # A normal cut at two standard deviations has 0.8796 of the variance's root; undo that.
    std = p.std() / 0.87962566
    return (std * jax.random.truncated_normal(key, -2.0, 2.0, p.shape)).astype(dtype)


def init(specs: Tree, key: jax.Array, dtype: DTypeLike = jnp.float32) -> Tree:
    """Draws initial values. A weight's draw depends only on `key` and its path in the tree."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(specs, is_leaf=is_param)
    values = []
    for path, p in leaves:
        name = jax.tree_util.keystr(path)
        seed = int.from_bytes(name.encode(), "little") % (2**31 - 1)
        values.append(_init_one(jax.random.fold_in(key, seed), p, dtype))
    return jax.tree.unflatten(treedef, values)


def abstract(specs: Tree, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None) -> Tree:
    """ShapeDtypeStructs of the weights, with shardings when a mesh is given."""
    if mesh is None:
        return map_params(lambda p: jax.ShapeDtypeStruct(p.shape, dtype), specs)
    return map_params(
        lambda p, where: jax.ShapeDtypeStruct(p.shape, dtype, sharding=where),
        specs,
        shardings(specs, mesh),
    )


def shardings(specs: Tree, mesh: Mesh) -> Tree:
    """NamedSharding of every weight.

    Raises:
      ValueError: a weight does not split evenly over the mesh; the message names it.
    """

    def one(path: tuple, p: Param) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        sharding.check_divisible(name, p.shape, p.axes, mesh)
        return sharding.named(mesh, *p.axes)

    return jax.tree_util.tree_map_with_path(one, specs, is_leaf=is_param)


def count(specs: Tree) -> int:
    """Number of parameters."""
    return sum(math.prod(p.shape) for p in jax.tree.leaves(specs, is_leaf=is_param))


def cast(params: Tree, dtype: DTypeLike) -> Tree:
    """Weights in the dtype they are used in; a no-op when they already have it."""
    return jax.tree.map(lambda w: w.astype(dtype), params)
