"""What a step costs, counted on the traced program: nothing is computed, compiled or allocated.

FLOPs are those of the matrix products and convolutions, two for each multiplication with addition;
norms, softmax and other elementwise work (a few per cent of a step) are left out, as is usual when
utilisation is quoted (Chowdhery et al. 2022, appendix B). A scan counts once for each of its steps,
recomputation in the backward pass counts as the work it is.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from bluelm_jax import config, layout, objective, optim, params, vlm
from bluelm_jax.batch import Batch
from bluelm_jax.run_config import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepCost:
    """Cost of one micro-batch of a training step, on all devices together.

    Attributes:
      forward_flops: of the forward pass and loss.
      step_flops: of forward and backward pass, recomputation included.
      kept_bytes: arrays that the forward pass keeps for the backward pass, weights apart.
    """

    forward_flops: int
    step_flops: int
    kept_bytes: int


def abstract_batch(
    model: config.VLMConfig, rows: int, seq_len: int, groups: int, tiles: int, corners: bool = False
) -> Batch:
    """Shapes and dtypes of a batch of `rows` rows whose `groups` groups have `tiles` tiles each."""
    size = model.vision.tile_size

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    return Batch(
        tokens=array(jnp.int32, rows, seq_len),
        loss_weights=array(jnp.float32, rows, seq_len),
        positions=array(jnp.int32, rows, seq_len),
        segments=array(jnp.int32, rows, seq_len),
        image_index=array(jnp.int32, rows, seq_len),
        tiles=array(jnp.uint8, groups, tiles, size, size, 3),
        corner_index=array(jnp.int32, rows, seq_len, 4) if corners else None,
        corner_weights=array(jnp.float32, rows, seq_len, 4) if corners else None,
    )


def forward_flops(model: config.VLMConfig, seq_len: int, tiles: int) -> int:
    """FLOPs of the forward pass, logits included, of a row of `seq_len` positions with `tiles`."""
    weights = params.abstract(vlm.specs(model))
    batch = abstract_batch(model, 1, seq_len, 1, tiles)
    return matmul_flops(functools.partial(vlm.logits, cfg=model), weights, batch)


def step_cost(run: RunConfig) -> StepCost:
    """Counts a micro-batch of `run`: the parts it trains, its loss chunks, remat and blocks."""
    data, ways = run.data, run.train.accumulation
    rows, groups = data.batch_size // ways, data.tile_groups // ways
    corners = layout.resizes(data.layout)
    batch = abstract_batch(
        run.model, rows, data.seq_len, groups, data.tiles_per_group, corners=corners
    )
    weights = params.abstract(vlm.specs(run.model))
    trained, frozen = optim.partition(weights, run.train.trainable)

    def value(trained: Any, frozen: Any, batch: Batch) -> jax.Array:
        return objective.loss_sums(run, trained, frozen, batch).loss

    return StepCost(
        forward_flops=matmul_flops(value, trained, frozen, batch),
        step_flops=matmul_flops(jax.grad(value), trained, frozen, batch),
        kept_bytes=kept_bytes(value, trained, frozen, batch),
    )


def matmul_flops(f: Callable[..., Any], *args: Any) -> int:
    """FLOPs of the products in `f(*args)`; the arguments may be abstract (ShapeDtypeStruct)."""
    return _flops(jax.make_jaxpr(f)(*args).jaxpr)


def kept_bytes(f: Callable[..., Any], first: Any, *rest: Any) -> int:
    """Bytes that `f` keeps to differentiate with respect to `first`, without its own arguments.

    What automatic differentiation asks for; a compiler may keep less.
    """

    def kept(first: Any, *rest: Any) -> list[Any]:
        _, pullback = jax.vjp(lambda first: f(first, *rest), first)
        return jax.tree.leaves(pullback)

    jaxpr = jax.make_jaxpr(kept)(first, *rest).jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    new = {v for v in jaxpr.outvars if isinstance(v, type(jaxpr.invars[0])) and v not in given}
    avals: list[Any] = [v.aval for v in new]
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


def _flops(jaxpr: Jaxpr) -> int:
    return sum(_equation_flops(e) for e in jaxpr.eqns)


def _equation_flops(e: JaxprEqn) -> int:
    shapes: list[tuple[int, ...]] = [getattr(v.aval, "shape", ()) for v in (*e.invars, *e.outvars)]
    match e.primitive.name:
        case "dot_general":
            (contracted, _), _ = e.params["dimension_numbers"]
            return 2 * math.prod(shapes[-1]) * math.prod(shapes[0][d] for d in contracted)
        case "conv_general_dilated":
            kernel = shapes[1]
            features = kernel[e.params["dimension_numbers"].rhs_spec[0]]
            return 2 * math.prod(shapes[-1]) * math.prod(kernel) // features
        case "scan":
            return e.params["length"] * _flops(e.params["jaxpr"].jaxpr)
        case "cond":
            return max(_flops(branch.jaxpr) for branch in e.params["branches"])
    return sum(_flops(inner) for inner in _inner(e))


def _inner(e: JaxprEqn) -> Iterator[Jaxpr]:
    """Programs that an equation calls once: jit, remat, custom derivatives, a loop's body."""
    for value in e.params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if isinstance(each, ClosedJaxpr):
                yield each.jaxpr
            elif isinstance(each, Jaxpr):
                yield each
