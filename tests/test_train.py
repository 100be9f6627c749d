"""Training: golden first steps, accumulation, frozen parts, and runs that stop and continue."""

import dataclasses
import functools
import json
import shutil
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_helpers import write_dataset
from model_helpers import (
    TINY,
    assert_trees_close,
    assert_trees_equal,
    batch_arrays,
    golden,
    make_batch,
    make_run,
    replace,
    weights,
)

from bluelm_jax import (
    checkpoints,
    config,
    metrics_log,
    params,
    serialize,
    sharding,
    train,
    train_state,
    vlm,
)
from bluelm_jax.batch import Batch


@pytest.fixture(autouse=True)
def interruptible():
    """Ctrl-C interrupts, also where a shell started the tests in the background, ignoring it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# One block each: a third of the tiny model's compile time.
SMALL = dataclasses.replace(
    TINY,
    vision=dataclasses.replace(TINY.vision, depth=1),
    decoder=dataclasses.replace(TINY.decoder, depth=1),
)


@pytest.fixture(scope="module", autouse=True)
def compiled_once(tmp_path_factory):
    """Starting a run again compiles the same programs again; these tests do that often."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("xla")))
    jax.config.update(names[1], 0.0)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture(scope="module", autouse=True)
def one_device():
    """`train` takes all devices there are; here, the first."""
    with pytest.MonkeyPatch.context() as patch:
        real = sharding.make_mesh
        patch.setattr(sharding, "make_mesh", lambda cfg: real(cfg, jax.devices()[:1]))
        yield


# One step --------------------------------------------------------------------------------------------


def jit_step(run):
    return jax.jit(functools.partial(train.train_step, run=run))


def test_golden_first_steps():
    """The losses of three steps are those on record, from the drawing of the weights on."""
    run = make_run()
    step, state = jit_step(run), jax.jit(functools.partial(train_state.init_state, run))()
    rows = []
    for seed in range(3):
        state, metrics = step(state, make_batch(seed=seed))
        rows.append({name: float(value) for name, value in metrics.items()})
    expected = golden("golden_train.json", rows)
    for n, (got, want) in enumerate(zip(rows, expected, strict=True), 1):
        for name, value in want.items():
            assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-7), (
                f"{name} of step {n} is {got[name]}, on record is {value}. If the change is meant, "
                "say in the commit message why it is right, and store the new values with "
                "UPDATE_GOLDEN=1 make test-one T=tests/test_train.py"
            )


def test_loss_starts_near_that_of_guessing():
    run = make_run()
    state = jax.jit(functools.partial(train_state.init_state, run))()
    metrics = jit_step(run)(state, make_batch())[1]
    assert np.log(280) - 0.5 < float(metrics["loss"]) < np.log(280) + 1.5


def uneven_batch():
    """Supervised tokens a row: 1, 12, 0, 3."""
    arrays = batch_arrays(rows=4, groups=4, tiles=1)
    for row, count in enumerate((1, 12, 0, 3)):
        arrays["loss_weights"][row] = 0
        arrays["loss_weights"][row, 12 : 12 + count] = 1
        arrays["segments"][row] = 1
        arrays["positions"][row] = np.arange(32)
    return Batch(**{name: jnp.asarray(x) for name, x in arrays.items()})


@pytest.fixture(scope="module")
def whole_batch():
    run = make_run(model=SMALL, data={"tile_groups": 4, "tiles_per_group": 1})
    return run, jax.jit(functools.partial(train.gradients, run))(weights(SMALL), uneven_batch())


@pytest.mark.parametrize("count", [2, 4])
def test_accumulation_equals_the_big_batch(whole_batch, count):
    run, (grads, sums) = whole_batch
    run = replace(run, "train", accumulation=count)
    got, got_sums = jax.jit(functools.partial(train.gradients, run))(weights(SMALL), uneven_batch())
    assert float(sums.weight) == 16
    assert_trees_close(got_sums, sums, rtol=1e-5)
    assert_trees_close(got, grads, rtol=1e-4, atol=1e-6)


def test_gradients_are_those_of_the_mean(whole_batch):
    """Twice the tokens with the same loss each: the same gradient."""
    run, (grads, _) = whole_batch
    batch = uneven_batch()
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
    got, sums = jax.jit(functools.partial(train.gradients, run))(weights(SMALL), twice)
    assert float(sums.weight) == 32
    assert_trees_close(got, grads, rtol=1e-4, atol=1e-6)


def test_micro_batches_keep_rows_with_their_tiles():
    batch = make_batch(rows=8, groups=4, tiles=2)
    micros = train.micro_batches(batch, 2)
    assert micros.tokens.shape == (2, 4, 32) and micros.tiles.shape == (2, 2, 2, 20, 20, 3)
    np.testing.assert_array_equal(micros.tokens[1], batch.tokens[4:])
    np.testing.assert_array_equal(micros.tiles[1], batch.tiles[2:])


def test_a_batch_without_supervised_tokens_changes_nothing_but_by_decay():
    run = make_run(model=SMALL)
    optim = config.OptimConfig(warmup_steps=0, weight_decay=0.0)
    run = replace(run, "train", optim=optim)
    batch = make_batch()
    batch = batch.replace(loss_weights=jnp.zeros_like(batch.loss_weights))
    state = train_state.init_state(run, weights(SMALL))
    after, metrics = jit_step(run)(state, batch)
    assert_trees_equal(after.params, state.params)
    assert float(metrics["loss"]) == float(metrics["tokens"]) == float(metrics["grad_norm"]) == 0


def test_frozen_parts_stay_and_have_no_optimizer_state():
    run = make_run(model=SMALL, trainable=("downsampler", "projector"))
    run = replace(run, "train", optim=config.OptimConfig(warmup_steps=0, weight_decay=0.1))
    state = train_state.init_state(run, weights(SMALL))
    after, _ = jit_step(run)(state, make_batch())
    for part in ("vision", "decoder"):
        assert_trees_equal(after.params[part], state.params[part])
    for part in ("downsampler", "projector"):
        moved = jax.tree.map(
            lambda a, b: bool((a != b).all()), after.params[part], state.params[part]
        )
        assert all(jax.tree.leaves(moved)), part
    held = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(after.opt_state)
        if leaf.ndim
    }
    assert held and all("/downsampler/" in name or "/projector/" in name for name in held)


def test_metrics_of_a_step():
    run = make_run(model=SMALL)
    state, batch = train_state.init_state(run, weights(SMALL)), make_batch()
    state = state.replace(step=jnp.int32(3), opt_state=set_counts(state.opt_state, 3))
    after, metrics = jit_step(run)(state, batch)
    grads, sums = jax.jit(functools.partial(train.gradients, run))(state.params, batch)
    assert float(metrics["tokens"]) == float(sums.weight) > 10
    assert float(metrics["loss"]) == pytest.approx(float(sums.loss / sums.weight), rel=1e-5)
    assert float(metrics["accuracy"]) == pytest.approx(float(sums.correct / sums.weight))
    norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in jax.tree.leaves(grads)))
    assert float(metrics["grad_norm"]) == pytest.approx(norm, rel=1e-4)
    lr = 0.5 * (1 + np.cos(np.pi * 2 / 5)) * 3e-3  # Step 3 of 6, after one of warm-up.
    assert float(metrics["lr"]) == pytest.approx(lr, rel=1e-5)
    assert int(after.step) == 4


def set_counts(opt_state, step):
    """The optimizer's own counters, as they are after `step` steps."""
    return jax.tree.map(lambda x: jnp.int32(step) if x.ndim == 0 else x, opt_state)


def test_overfits_one_batch():
    run = make_run(model=SMALL, steps=80)
    optim = config.OptimConfig(peak_lr=1e-2, warmup_steps=5, b2=0.95, weight_decay=0.0)
    run = replace(run, "train", optim=optim)
    step, batch = jit_step(run), make_batch()
    state = train_state.init_state(run, weights(SMALL))
    losses = []
    for _ in range(80):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] > 4 and losses[-1] < 0.05 and float(metrics["accuracy"]) == 1


# Whole runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Six steps of four samples, saved after every second one."""
    path = write_dataset(tmp_path_factory.mktemp("data"), count=10)
    data = {"seq_len": 96, "tile_groups": 2, "tiles_per_group": 2}
    return make_run(path, model=SMALL, data=data, save_every=2, log_every=2)


def weights_of(directory):
    abstract = params.abstract(vlm.specs(SMALL))
    return checkpoints.restore_params(directory / "checkpoints", abstract)


@pytest.fixture(scope="module")
def uninterrupted(run, tmp_path_factory):
    directory = tmp_path_factory.mktemp("whole")
    return directory, train.train(run, directory)


def assert_same_run(directory, finished, uninterrupted):
    """Weights, optimizer and metrics are those of the run that was never interrupted."""
    whole, expected = uninterrupted
    assert_trees_equal(finished.state, expected.state)
    assert_trees_equal(weights_of(directory), expected.state.params)
    assert (directory / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert finished.data == expected.data


def test_a_run_leaves_config_metrics_events_and_checkpoints(run, uninterrupted):
    directory, finished = uninterrupted
    assert (finished.step, finished.steps_now) == (6, 6) and finished.seconds > 0
    assert serialize.load_run_config(directory) == run
    lines = metrics_log.read_lines(directory / "metrics.jsonl")
    assert [line["step"] for line in lines] == [2, 4, 6]
    of_step = {"loss", "accuracy", "tokens", "grad_norm", "lr"}
    assert set(lines[0]) == {"step", *of_step, "position_fill", "tile_fill"}
    assert all(0 < line["position_fill"] <= 1 and line["tile_fill"] == 1 for line in lines)
    assert sorted(d.name for d in (directory / "checkpoints").iterdir()) == ["4", "6"]
    assert len(list(directory.glob("events.out.tfevents.*"))) == 1


def test_starting_a_finished_run_does_nothing(run, uninterrupted, tmp_path):
    directory = shutil.copytree(uninterrupted[0], tmp_path / "run")
    finished = train.train(run, directory)
    assert (finished.step, finished.steps_now) == (6, 0)
    assert_same_run(directory, finished, uninterrupted)


def test_a_run_that_is_past_its_steps_says_so(run, uninterrupted, tmp_path):
    directory = shutil.copytree(uninterrupted[0], tmp_path / "run")
    finished = train.train(replace(run, "train", steps=4), directory)
    assert (finished.step, finished.steps_now) == (6, 0)


def interrupt_at(step):
    """Ctrl-C while `step` is being reported."""

    def progress(now, _):
        if now == step:
            signal.raise_signal(signal.SIGINT)

    return progress


@pytest.mark.parametrize("step", [1, 3, 4])
def test_ctrl_c_saves_and_the_run_continues_identically(run, uninterrupted, tmp_path, step):
    with pytest.raises(KeyboardInterrupt):
        train.train(run, tmp_path, interrupt_at(step))
    assert checkpoints.latest_step(tmp_path / "checkpoints") == step
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finished = train.train(run, tmp_path)
    assert finished.steps_now == 6 - step
    assert_same_run(tmp_path, finished, uninterrupted)


def test_ctrl_c_in_the_middle_of_a_step(run, uninterrupted, tmp_path, monkeypatch):
    """The batch that was read ahead during step 2 is not in the state that is saved."""
    real, calls = train.device_batch, []

    def device_batch(*args):
        calls.append(args)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(train, "device_batch", device_batch)
    with pytest.raises(KeyboardInterrupt):
        train.train(run, tmp_path)
    assert checkpoints.latest_step(tmp_path / "checkpoints") == 2
    assert_same_run(tmp_path, train.train(run, tmp_path), uninterrupted)


def test_a_second_ctrl_c_does_not_wait(run, tmp_path):
    def progress(step, _):
        if step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train.train(run, tmp_path, progress)
    assert checkpoints.latest_step(tmp_path / "checkpoints") == 2


def test_ctrl_c_in_the_last_step_is_no_interruption(run, tmp_path):
    assert train.train(run, tmp_path, interrupt_at(6)).step == 6


def test_a_crash_continues_from_the_last_checkpoint(run, uninterrupted, tmp_path):
    def progress(step, _):
        if step == 5:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train.train(run, tmp_path, progress)
    # What a killed process may leave: a line of a later step, and one that is torn.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    finished = train.train(run, tmp_path)
    assert finished.steps_now == 2
    assert_same_run(tmp_path, finished, uninterrupted)


def test_a_longer_run_continues_a_shorter_one(run, uninterrupted, tmp_path):
    directory = shutil.copytree(uninterrupted[0], tmp_path / "run")
    finished = train.train(replace(run, "train", steps=8), directory)
    assert (finished.step, finished.steps_now) == (8, 2)
    steps = [line["step"] for line in metrics_log.read_lines(directory / "metrics.jsonl")]
    assert steps == [2, 4, 6, 8]


def test_another_model_is_refused_and_nothing_is_overwritten(run, uninterrupted, tmp_path):
    directory = shutil.copytree(uninterrupted[0], tmp_path / "run")
    before = {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}
    wide = dataclasses.replace(SMALL.decoder, mlp_dim=32)
    other = replace(run, "model", decoder=wide)
    with pytest.raises(checkpoints.CheckpointError, match="params/decoder/blocks/mlp/down/kernel"):
        train.train(other, directory, texts={"config.gin": "other"})
    after = {p.name: p.read_bytes() for p in directory.iterdir() if p.is_file()}
    assert after == before


def test_other_data_are_refused(run, uninterrupted, tmp_path):
    directory = shutil.copytree(uninterrupted[0], tmp_path / "run")
    with pytest.raises(ValueError, match="the data state belongs to order"):
        train.train(replace(run, "data", seed=1), directory)


def test_stage_two_starts_from_stage_one(run, uninterrupted, tmp_path):
    """Projector-only training, then everything from its checkpoint, with a fresh optimizer."""
    stage1 = replace(run, "train", steps=2, trainable=("downsampler", "projector"))
    one = train.train(stage1, tmp_path / "one", texts={"config.gin": "notes"})
    assert (tmp_path / "one" / "config.gin").read_text() == "notes"
    mesh = sharding.make_mesh(config.MeshConfig())
    start = train_state.first_state(stage1, mesh)
    for part in ("vision", "decoder"):
        assert_trees_equal(one.state.params[part], start.params[part])
    assert not np.array_equal(
        one.state.params["projector"]["fc1"]["kernel"], start.params["projector"]["fc1"]["kernel"]
    )
    stage2 = replace(run, "train", init_from=str(tmp_path / "one" / "checkpoints"), steps=2)
    begin = train_state.first_state(stage2, mesh)
    assert_trees_equal(begin.params, one.state.params)
    assert int(begin.step) == 0 and not any(x.any() for x in jax.tree.leaves(begin.opt_state))
    two = train.train(stage2, tmp_path / "two")
    moved = [
        bool((a != b).any())
        for part in ("vision", "decoder")
        for a, b in zip(
            jax.tree.leaves(two.state.params[part]),
            jax.tree.leaves(begin.params[part]),
            strict=True,
        )
    ]
    assert all(moved)


def test_init_from_another_model_names_the_difference(run, uninterrupted):
    directory, _ = uninterrupted
    tied = dataclasses.replace(SMALL.decoder, tied_head=True)
    other = replace(run, "model", decoder=tied)
    other = replace(other, "train", init_from=str(directory / "checkpoints"))
    with pytest.raises(checkpoints.CheckpointError, match="decoder/head: unknown to this model"):
        train_state.first_state(other, sharding.make_mesh(config.MeshConfig()))


def test_data_that_end_too_early(run, tmp_path):
    with pytest.raises(ValueError, match=r"the data ended after 2 of 6 steps; set data.epochs"):
        train.train(replace(run, "data", epochs=1), tmp_path)


def test_a_vocabulary_too_small_for_the_tokenizer(run, tmp_path):
    small = dataclasses.replace(SMALL.decoder, vocab_size=200)
    with pytest.raises(ValueError, match=r"tokenizer has \d+ ids, model.decoder.vocab_size = 200"):
        train.train(replace(run, "model", decoder=small), tmp_path)
    assert not (tmp_path / "config.json").exists()


def test_a_state_that_is_not_finite_is_never_saved(run, tmp_path):
    """Noticed at the next save even where nothing is logged."""
    optim = config.OptimConfig(peak_lr=1e25, warmup_steps=0, clip_norm=None)
    wild = replace(run, "train", optim=optim, save_every=1, log_every=6)
    with pytest.raises(FloatingPointError, match=r"(loss|grad_norm) = (nan|inf) at step [23]"):
        train.train(wild, tmp_path)
    kept = weights_of(tmp_path)
    assert all(np.isfinite(w).all() for w in jax.tree.leaves(kept))


# The metrics file ------------------------------------------------------------------------------------


def test_metrics_log_continues_without_repeating(tmp_path):
    with metrics_log.MetricsLog(tmp_path, 0) as log:
        for step in (1, 2, 3):
            log.write(step, {"loss": 1 / step})
    with metrics_log.MetricsLog(tmp_path, 2) as log:
        log.write(3, {"loss": 0.1 + 0.2})
    lines = metrics_log.read_lines(tmp_path / "metrics.jsonl")
    assert lines == [
        {"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, {"step": 3, "loss": 0.1 + 0.2}
    ]  # fmt: skip
    assert metrics_log.read_lines(tmp_path / "none.jsonl") == []
    assert all(json.loads(x) for x in (tmp_path / "metrics.jsonl").read_text().splitlines())
