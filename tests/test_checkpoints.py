"""Saving and restoring: what comes back, on which mesh, and what is said when it cannot."""

import dataclasses
import errno
import gc
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, assert_trees_equal, make_run, weights

from bluelm_jax import checkpoints, config, params, sharding, train_state, vlm
from bluelm_jax.checkpoints import Checkpointer, CheckpointError, latest_step, restore_params

RUN = make_run(trainable=("downsampler", "projector"))
MESH = sharding.make_mesh(config.MeshConfig(data=2, fsdp=2, tensor=2))
DATA = {"place": 12, "waiting": [3, 4]}


def with_decoder(**fields):
    return dataclasses.replace(TINY, decoder=dataclasses.replace(TINY.decoder, **fields))


def abstract(run=RUN, mesh=MESH):
    return train_state.abstract_state(run, mesh)


@pytest.fixture(scope="module")
def state():
    where = train_state.state_shardings(RUN, MESH)
    made = train_state.init_state(RUN, weights()).replace(step=jnp.int32(5))
    return jax.device_put(made, where)


@pytest.fixture(scope="module")
def directory(tmp_path_factory, state):
    path = tmp_path_factory.mktemp("run") / "checkpoints"
    saver = Checkpointer(path)
    saver.save(5, state, DATA, "the config")
    saver.close()
    return path


@pytest.fixture
def saver(directory):
    saver = Checkpointer(directory)
    yield saver
    saver.close()


@pytest.fixture
def copied(directory, tmp_path):
    return shutil.copytree(directory, tmp_path / "checkpoints")


def test_round_trip(saver, state):
    restored, data = saver.restore(abstract())
    assert_trees_equal(restored, state)
    assert data == DATA and saver.latest() == 5
    same = jax.tree.map(lambda a, b: a.sharding == b.sharding, restored, state)
    assert all(jax.tree.leaves(same))


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 4, 1), (1, 2, 4)])
def test_restore_on_another_mesh(saver, state, shape):
    cfg = config.MeshConfig(data=shape[0], fsdp=shape[1], tensor=shape[2])
    mesh = sharding.make_mesh(cfg, jax.devices()[: np.prod(shape)])
    restored, _ = saver.restore(abstract(mesh=mesh))
    assert_trees_equal(restored, state)
    gate = restored.params["decoder"]["blocks"]["mlp"]["gate"]["kernel"]
    assert gate.sharding.shard_shape(gate.shape) == (2, 32 // shape[1], 64 // shape[2])


def test_weights_alone(directory, state):
    """By any device or none: what wrote them may be gone."""
    plain = restore_params(directory, params.abstract(vlm.specs(TINY)))
    assert_trees_equal(plain, state.params)
    placed = restore_params(directory, params.abstract(vlm.specs(TINY), mesh=MESH))
    assert_trees_equal(placed, state.params)
    assert placed["decoder"]["embed"].sharding.shard_shape((280, 32)) == (140, 16)


def differences(model, **stage):
    """What `model` does not share with what is stored."""
    fields = {"trainable": ("downsampler", "projector"), **stage}
    return make_run(model=model, **fields)


def test_another_width_is_named_with_both_shapes(saver, directory):
    run = differences(with_decoder(mlp_dim=128))
    expected = (
        "another model or stage, 3 differences: .*decoder/blocks/mlp/down/kernel: "
        r"shape \(2, 64, 32\), this model has \(2, 128, 32\)"
    )
    with pytest.raises(CheckpointError, match=expected) as caught:
        saver.restore(abstract(run))
    assert str(directory / "5") in str(caught.value)
    with pytest.raises(CheckpointError, match=expected):
        restore_params(directory, params.abstract(vlm.specs(run.model)))


def test_missing_and_unknown_weights_are_named(saver, directory):
    tied = differences(with_decoder(tied_head=True, embed_norm=True))
    expected = (
        "3 differences: .*decoder/embed_norm/bias: missing; .*decoder/embed_norm/scale: missing; "
        ".*decoder/head: unknown to this model"
    )
    with pytest.raises(CheckpointError, match=expected):
        saver.restore(abstract(tied))
    with pytest.raises(CheckpointError, match=expected):
        restore_params(directory, params.abstract(vlm.specs(tied.model)))


def test_many_differences_are_counted_and_weights_come_first(saver):
    run = differences(with_decoder(depth=3), trainable=("decoder",))
    with pytest.raises(CheckpointError, match=r"\d\d differences: params/decoder/") as caught:
        saver.restore(abstract(run))
    assert len(str(caught.value)) < 1500


def test_another_stage_is_named(saver):
    with pytest.raises(CheckpointError, match=r"opt_state/.*/projector/fc1/bias: unknown to this"):
        saver.restore(abstract(make_run(trainable=("downsampler",))))


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match=f"no checkpoint in {tmp_path}/none"):
        restore_params(tmp_path / "none", params.abstract(vlm.specs(TINY)))
    saver = Checkpointer(tmp_path / "new")
    assert saver.latest() is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        saver.restore(abstract())
    saver.close()


def test_a_step_that_is_not_there(saver, directory):
    with pytest.raises(CheckpointError, match="/4: no checkpoint, or a damaged one"):
        saver.restore(abstract(), step=4)
    with pytest.raises(CheckpointError, match="/4: no checkpoint, or a damaged one"):
        restore_params(directory, params.abstract(vlm.specs(TINY)), step=4)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["ocdbt.process_0", "manifest.ocdbt", "_METADATA"])
def test_a_damaged_checkpoint(copied, damage):
    path = copied / "5" / "state" / damage
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.write_bytes(path.read_bytes()[:20])
    saver = Checkpointer(copied)
    with pytest.raises(CheckpointError, match=r"cannot read checkpoint .*/5") as caught:
        saver.restore(abstract())
    assert len(str(caught.value)) < 500
    with pytest.raises(CheckpointError, match=r"cannot read checkpoint .*/5"):
        restore_params(copied, params.abstract(vlm.specs(TINY)))
    saver.close()
    gc.collect()  # Orbax leaves coroutines behind, each with a warning of its own.


def test_a_checkpoint_without_its_state(copied):
    shutil.rmtree(copied / "5" / "state")
    with pytest.raises(CheckpointError, match="/5: no checkpoint, or a damaged one"):
        restore_params(copied, params.abstract(vlm.specs(TINY)))
    saver = Checkpointer(copied)
    with pytest.raises(CheckpointError, match="/5: no checkpoint, or a damaged one"):
        saver.restore(abstract())
    saver.close()


def test_only_the_newest_are_kept(tmp_path):
    saver = Checkpointer(tmp_path, keep=2)
    small = {"w": jnp.arange(3.0)}
    for step in (1, 2, 3):
        saver.save(step, small, {"place": step}, "")
    assert sorted(d.name for d in tmp_path.iterdir()) == ["2", "3"]
    shapes = {"w": jax.ShapeDtypeStruct((3,), jnp.float32, sharding=small["w"].sharding)}
    assert saver.restore(shapes)[1] == {"place": 3} and saver.restore(shapes, 2)[1] == {"place": 2}
    saver.close()


def test_saving_a_step_again_changes_nothing(copied, state):
    saver = Checkpointer(copied)
    saver.save(5, state, {"place": 99}, "")
    assert saver.restore(abstract())[1] == DATA
    saver.close()


def test_unfinished_writes_are_not_seen(copied):
    (copied / "7.orbax-checkpoint-tmp").mkdir()
    (copied / "notes").mkdir()
    assert latest_step(copied) == 5
    saver = Checkpointer(copied)
    assert saver.latest() == 5
    saver.close()
    assert latest_step(copied / "none") is None


def test_disk_full(copied, state, monkeypatch):
    saver = Checkpointer(copied)

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saver._manager, "save", fail)
    with pytest.raises(CheckpointError, match=r"cannot write checkpoint 6 to .*No space left"):
        saver.save(6, state, DATA, "")
    monkeypatch.undo()
    assert saver.latest() == 5 and saver.restore(abstract())[1] == DATA
    saver.close()


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot use .*/file/checkpoints for checkpoints"):
        Checkpointer(tmp_path / "file" / "checkpoints")


def test_errors_are_value_errors():
    """The command line reports those in one line."""
    assert issubclass(checkpoints.CheckpointError, ValueError)
