"""What a run trains: weights, optimizer state, where they live and how they start."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from bluelm_jax import checkpoints, optim, params, sharding, vision, vlm
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
    """Step 0, with the weights given; parts that are not given are drawn from the seed."""
    given = weights or {}
    missing = {part: specs for part, specs in vlm.specs(run.model).items() if part not in given}
    weights = {**params.init(missing, jax.random.key(run.train.seed)), **given}
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
    """The state that a new run starts from: random, or the weights of `train.init_from`.

    Raises:
      CheckpointError: no checkpoint there, or weights of another model (names, shapes listed).
      ValueError: the model has none of `train.init_parts`.
    """
    where = state_shardings(run, mesh)
    if run.train.init_from is None:
        return jax.jit(functools.partial(init_state, run), out_shardings=where)()
    weights = _stored_weights(run, run.train.init_from, mesh)
    return jax.jit(functools.partial(init_state, run), out_shardings=where)(weights)


def _stored_weights(run: RunConfig, directory: str, mesh: Mesh) -> Tree:
    """What a run takes from a checkpoint; positions of another tile size are resized."""
    wanted, read = params.abstract(vlm.specs(run.model), mesh=mesh), checkpoints.restore_params
    if run.train.init_parts is not None:
        parts = run.train.init_parts
        chosen, _ = optim.partition(wanted, parts, "TrainConfig.init_parts")
        if absent := [part for part in parts if part not in chosen]:
            warnings.warn(
                f"TrainConfig.init_parts = {parts}: this model has no weights of "
                f"{', '.join(absent)}, so nothing is taken for them",
                stacklevel=2,
            )
        wanted = chosen
        read = checkpoints.restore_part
    stored = checkpoints.stored_params(directory).get("vision/position")
    place = wanted["vision"]["position"] if "vision" in wanted else None
    if stored is None or place is None or stored.shape == place.shape:
        return read(directory, wanted)
    if stored.shape[1:] != place.shape[1:]:
        return read(directory, wanted)  # Raises, and lists all that differs.
    table = jax.ShapeDtypeStruct(stored.shape, place.dtype, sharding=sharding.named(mesh))
    weights = read(directory, {**wanted, "vision": {**wanted["vision"], "position": table}})
    resized = vision.resize_positions(
        np.asarray(weights["vision"]["position"]), run.model.vision.side
    )
    weights["vision"]["position"] = jax.device_put(resized, place.sharding)
    return weights
