"""What a run trains: weights, optimizer state, where they live and how they start."""

from __future__ import annotations

import functools
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from bluelm_jax import checkpoints, optim, params, sharding, vlm
from bluelm_jax.params import Tree
from bluelm_jax.run_config import RunConfig


@flax.struct.dataclass
class TrainState:
    """Steps done, all weights (float32), optimizer state of the trainable ones."""

    step: Int[Array, ""]
    params: Tree
    opt_state: Any


def trainable_specs(run: RunConfig) -> Tree:
    """Declarations of the weights that this stage trains."""
    return optim.partition(vlm.specs(run.model), run.train.trainable)[0]


def make_optimizer(run: RunConfig) -> optax.GradientTransformation:
    """The stage's optimizer."""
    return optim.make_optimizer(run.train.optim, run.train.steps, trainable_specs(run))


def init_state(run: RunConfig, weights: Tree | None = None) -> TrainState:
    """Step 0, with weights drawn from the seed or given."""
    if weights is None:
        weights = params.init(vlm.specs(run.model), jax.random.key(run.train.seed))
    trained, _ = optim.partition(weights, run.train.trainable)
    return TrainState(
        step=jnp.int32(0), params=weights, opt_state=make_optimizer(run).init(trained)
    )


def state_shardings(run: RunConfig, mesh: Mesh) -> Any:
    """A TrainState of shardings: where every leaf lives; moments follow their weights."""
    shardings = params.shardings(vlm.specs(run.model), mesh)
    trained, _ = optim.partition(shardings, run.train.trainable)
    replicated = sharding.named(mesh)
    opt = jax.eval_shape(make_optimizer(run).init, params.abstract(trainable_specs(run)))
    opt = optax.tree_map_params(
        make_optimizer(run), lambda _, where: where, opt, trained,
        transform_non_params=lambda _: replicated,
    )  # fmt: skip
    return TrainState(
        step=replicated,  # pyright: ignore[reportArgumentType]
        params=shardings,
        opt_state=opt,
    )


def abstract_state(run: RunConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state: what a restore must produce."""
    shapes = jax.eval_shape(functools.partial(init_state, run))
    return jax.tree.map(
        lambda s, where: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=where),
        shapes,
        state_shardings(run, mesh),
    )


def first_state(run: RunConfig, mesh: Mesh) -> TrainState:
    """The state that a new run starts from: random, or the weights of `train.init_from`."""
    where = state_shardings(run, mesh)
    if run.train.init_from is None:
        return jax.jit(functools.partial(init_state, run), out_shardings=where)()
    abstract = params.abstract(vlm.specs(run.model), mesh=mesh)
    weights = checkpoints.restore_params(run.train.init_from, abstract)
    return jax.jit(functools.partial(init_state, run), out_shardings=where)(weights)
