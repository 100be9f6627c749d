"""Training: one pure step, and the loop around it.

`train_step` is a function of state and batch. `train` builds what it needs, restores what is there,
and runs it; a run that was interrupted continues with the same batches and the same numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array

from bluelm_jax import checkpoints, data_states, loss, objective, optim, serialize, sharding
from bluelm_jax.batch import Batch
from bluelm_jax.data.pipeline import BatchIterator, Pipeline
from bluelm_jax.data.sources import Records
from bluelm_jax.data.tokenizer import check_fits
from bluelm_jax.files import write_text
from bluelm_jax.interrupt import DeferredInterrupt
from bluelm_jax.metrics_log import MetricsLog
from bluelm_jax.params import Tree
from bluelm_jax.prefetch import DevicePrefetch, Fetched
from bluelm_jax.run_config import RunConfig
from bluelm_jax.train_state import (
    TrainState,
    abstract_state,
    first_state,
    make_optimizer,
    state_shardings,
)


@dataclasses.dataclass(frozen=True)
class Finished:
    """What a call of `train` did.

    Attributes:
      step: steps of the run so far.
      steps_now: steps of this call.
      seconds: wall time of this call's steps, compilation and checkpoints included.
      data: what the data pipeline counted over the whole run, with names of what it left out.
      state: the final state.
    """

    step: int
    steps_now: int
    seconds: float
    data: str
    state: TrainState


def micro_batches(batch: Batch, count: int) -> Batch:
    """Splits the rows, and the groups of tiles, into `count` micro-batches on a leading axis."""
    return jax.tree.map(lambda x: x.reshape(count, x.shape[0] // count, *x.shape[1:]), batch)


def gradients(run: RunConfig, weights: Tree, batch: Batch) -> tuple[Tree, loss.LossSums]:
    """Gradients of the mean loss over all supervised tokens of all micro-batches, and the sums."""
    trained, frozen = optim.partition(weights, run.train.trainable)

    def summed_loss(trained: Tree, micro: Batch):
        sums = objective.loss_sums(run, trained, frozen, micro)
        return sums.loss, sums

    grad = jax.grad(summed_loss, has_aux=True)
    if run.train.accumulation == 1:
        grads, sums = grad(trained, batch)
    else:
        micros = micro_batches(batch, run.train.accumulation)
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(grad, trained, _first(micros)))

        def step(total, micro):
            return jax.tree.map(jnp.add, total, grad(trained, micro)), None

        (grads, sums), _ = jax.lax.scan(step, zeros, micros)
    tokens = jnp.maximum(sums.weight, 1.0)
    return jax.tree.map(lambda g: g / tokens, grads), sums


def _first(micros: Batch) -> Batch:
    return jax.tree.map(lambda x: x[0], micros)


def train_step(
    state: TrainState, batch: Batch, *, run: RunConfig
) -> tuple[TrainState, dict[str, Array]]:
    """One optimizer step.

    Returns:
      The next state and scalars: loss (nats a supervised token), accuracy (share of supervised
      tokens whose argmax is right), tokens (supervised), grad_norm (before clipping), lr.
    """
    grads, sums = gradients(run, state.params, batch)
    trained, _ = optim.partition(state.params, run.train.trainable)
    updates, opt_state = make_optimizer(run).update(grads, state.opt_state, trained)
    updated: Tree = optax.apply_updates(trained, updates)
    weights = {**state.params, **updated}
    tokens = jnp.maximum(sums.weight, 1.0)
    metrics = {
        "loss": sums.loss / tokens,
        "accuracy": sums.correct / tokens,
        "tokens": sums.weight,
        "grad_norm": optim.global_norm(grads),
        "lr": jnp.asarray(optim.schedule(run.train.optim, run.train.steps)(state.step)),
    }
    return TrainState(step=state.step + 1, params=weights, opt_state=opt_state), metrics


# The loop ----------------------------------------------------------------------------------------


def device_batch(arrays: dict[str, np.ndarray], mesh: Mesh) -> Batch:
    """A host's rows as its part of the global batch, split over the data axes."""

    def put(x: np.ndarray) -> Array:
        where = sharding.named(mesh, "batch", *(None,) * (x.ndim - 1))
        return jax.make_array_from_process_local_data(where, x)

    return Batch(**{name: put(x) for name, x in arrays.items()})


def check_mesh(run: RunConfig, mesh: Mesh) -> None:
    """Raises ValueError unless rows and tile groups split evenly over the devices."""
    ways = sharding.data_parallelism(mesh) * run.train.accumulation
    for field in ("batch_size", "tile_groups"):
        value = getattr(run.data, field) * jax.process_count()
        if value % ways:
            raise ValueError(
                f"data.{field} = {value} over all hosts must be a multiple of data x fsdp x "
                f"accumulation = {ways}"
            )


Progress = Callable[[int, dict[str, float]], None]


def train(
    run: RunConfig,
    workdir: str | Path,
    progress: Progress | None = None,
    texts: Mapping[str, str] | None = None,
    records: Sequence[Records] | None = None,
) -> Finished:
    """Trains to `run.train.steps`, from the newest checkpoint in `workdir` if there is one.

    `workdir` receives config.json, metrics.jsonl (what `train_step` returns, and how full the
    batch is), TensorBoard events and checkpoints/. On Ctrl-C
    the step is finished and the state saved before KeyboardInterrupt is raised; a second Ctrl-C
    does not wait for that.

    Args:
      progress: called after each step with the step and, every log_every steps, its metrics.
      texts: further files for `workdir`, by name. Like config.json they are written only once the
        checkpoint that is there has turned out to be of this run.
      records: the records of `run.data.sources`, where they are open already; see `Pipeline`.

    Raises:
      ValueError: config, data or checkpoint do not fit; CheckpointError when saving fails.
      FloatingPointError: loss or gradient are not finite; no such state is ever saved.
    """
    workdir = Path(workdir)
    mesh = sharding.make_mesh(run.train.mesh)
    check_mesh(run, mesh)
    pipeline = Pipeline(
        run.data,
        side=run.token_side,
        records=records,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    check_fits(pipeline.tokenizer, run.model.decoder.vocab_size)
    workdir.mkdir(parents=True, exist_ok=True)
    saver = checkpoints.Checkpointer(workdir / "checkpoints", run.train.keep_checkpoints)
    batches = iter(pipeline)
    with contextlib.closing(saver), contextlib.closing(batches), jax.set_mesh(mesh):
        state = _first_or_restored(run, mesh, saver, batches)
        config_text = serialize.to_json(run)
        for name, text in {"config.json": config_text, **(texts or {})}.items():
            write_text(workdir / name, text)
        save = functools.partial(_save, saver, config_text)
        ahead = DevicePrefetch(batches, lambda arrays: device_batch(arrays, mesh))
        start, begin = int(state.step), time.monotonic()
        with MetricsLog(workdir, start) as log:
            state = _loop(run, mesh, state, ahead, save, log, progress)
        step, seconds = int(state.step), time.monotonic() - begin
        return Finished(step, step - start, seconds, batches.counters.report(), state)


def _first_or_restored(
    run: RunConfig, mesh: Mesh, saver: checkpoints.Checkpointer, batches: BatchIterator
) -> TrainState:
    if saver.latest() is None:
        return first_state(run, mesh)
    state, data_state = saver.restore(abstract_state(run, mesh))
    batches.set_state(data_states.own(data_state))
    return state


def _save(saver: checkpoints.Checkpointer, config: str, state: TrainState, fetched: Fetched):
    saver.save(int(state.step), state, data_states.of_all(fetched.state), config)


def _loop(
    run: RunConfig,
    mesh: Mesh,
    state: TrainState,
    ahead: DevicePrefetch,
    save: Callable[[TrainState, Fetched], None],
    log: MetricsLog,
    progress: Progress | None,
) -> TrainState:
    cfg = run.train
    step_fn = jax.jit(
        functools.partial(train_step, run=run),
        donate_argnums=0,
        out_shardings=(state_shardings(run, mesh), None),
    )
    with DeferredInterrupt() as interrupt:
        for step in range(int(state.step) + 1, cfg.steps + 1):
            fetched = _next_batch(run, ahead, step)
            state, metrics = step_fn(state, fetched.batch)
            if step < cfg.steps:
                ahead.fetch()  # While the devices work: nothing has waited for `metrics` yet.
            shown = {}
            if step % cfg.log_every == 0 or step == cfg.steps:
                shown = {k: float(v) for k, v in metrics.items()} | fetched.fill
                log.write(step, shown)
                _check_finite(step, shown)
            if progress is not None:
                progress(step, shown)
            stop = interrupt.seen
            if step % cfg.save_every == 0 or step == cfg.steps or stop:
                _check_finite(step, metrics)
                save(state, fetched)
            if stop and step < cfg.steps:
                raise KeyboardInterrupt
    return state


def _next_batch(run: RunConfig, ahead: DevicePrefetch, step: int) -> Fetched:
    try:
        return ahead.take()
    except StopIteration:
        raise ValueError(
            f"the data ended after {step - 1} of {run.train.steps} steps; "
            "set data.epochs = None or lower train.steps"
        ) from None


def _check_finite(step: int, metrics: Mapping[str, Array | float]) -> None:
    for name in ("loss", "grad_norm"):
        if not np.isfinite(metrics[name]):
            raise FloatingPointError(f"{name} = {float(metrics[name])} at step {step}")
