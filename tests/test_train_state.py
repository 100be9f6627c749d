"""Where a run's weights come from, part by part."""

import dataclasses

import jax
import numpy as np
import pytest
from model_helpers import TINY, assert_trees_equal, make_run, replace

from bluelm_jax import checkpoints, config, params, sharding, train_state, vision, vlm

MESH = config.MeshConfig(data=2, fsdp=2, tensor=2)


def pooled(run):
    return replace(run, "model", downsampler=config.AvgPool())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of the tiny model, and its weights: noise of another seed."""
    run = make_run(seed=7, steps=2)
    state = train_state.init_state(run)
    directory = tmp_path_factory.mktemp("run") / "checkpoints"
    saver = checkpoints.Checkpointer(directory)
    saver.save(1, state, {}, "")
    saver.close()
    return directory, state.params


def test_what_is_not_given_is_drawn_as_if_nothing_were():
    run = make_run(seed=3)
    alone = train_state.init_state(run).params
    given = {"vision": jax.tree.map(lambda w: w + 1, alone["vision"])}
    found = train_state.init_state(run, given).params
    assert_trees_equal(found["vision"], given["vision"])
    for part in ("downsampler", "projector", "decoder"):
        assert_trees_equal(found[part], alone[part])


def test_another_downsampler_starts_from_trained_parts(trained):
    directory, weights = trained
    run = replace(
        pooled(make_run(seed=3)), "train", init_from=str(directory),
        init_parts=("vision", "decoder"),
    )  # fmt: skip
    mesh = sharding.make_mesh(MESH)
    with jax.set_mesh(mesh):
        state = train_state.first_state(run, mesh)
    assert set(state.params) == {"vision", "projector", "decoder"}
    for part in ("vision", "decoder"):
        assert_trees_equal(state.params[part], weights[part])
    drawn = params.init(vlm.specs(run.model), jax.random.key(3))["projector"]
    for a, b in zip(
        jax.tree.leaves(state.params["projector"]), jax.tree.leaves(drawn), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_all_parts_by_default_and_what_does_not_fit_is_named(trained):
    directory, weights = trained
    run = replace(make_run(), "train", init_from=str(directory))
    mesh = sharding.make_mesh(MESH)
    with jax.set_mesh(mesh):
        assert_trees_equal(train_state.first_state(run, mesh).params, weights)
        with pytest.raises(checkpoints.CheckpointError, match=r"downsampler/fuse.*: unknown to"):
            train_state.first_state(pooled(run), mesh)
        lacking = replace(run, "train", init_parts=("newline",))
        with pytest.raises(ValueError, match=r"\('newline',\): the model has only"):
            train_state.first_state(lacking, mesh)
        newline = dataclasses.replace(lacking, model=dataclasses.replace(TINY, newline=True))
        with pytest.raises(checkpoints.CheckpointError, match="newline: missing"):
            train_state.first_state(newline, mesh)


def test_positions_of_another_tile_size_are_resized(trained):
    """28 pixels are 7 patches a side where the checkpoint has 5; the rest is taken as it is."""
    directory, weights = trained
    model = dataclasses.replace(TINY, vision=dataclasses.replace(TINY.vision, tile_size=28))
    run = replace(make_run(model=model), "train", init_from=str(directory))
    mesh = sharding.make_mesh(MESH)
    with jax.set_mesh(mesh):
        found = train_state.first_state(run, mesh).params
    position = np.asarray(weights["vision"]["position"])
    resized = vision.resize_positions(position, 7)
    np.testing.assert_array_equal(found["vision"]["position"], resized)
    assert_trees_equal(found["vision"]["blocks"], weights["vision"]["blocks"])
    assert_trees_equal(found["decoder"], weights["decoder"])


def test_init_parts_without_weights_are_said(trained):
    """PixelShuffle has none: alone it is an error, beside others a warning; both name the field."""
    directory, weights = trained
    run = replace(make_run(seed=3), "model", downsampler=config.PixelShuffle())
    alone = replace(run, "train", init_from=str(directory), init_parts=("downsampler",))
    more = replace(run, "train", init_from=str(directory), init_parts=("downsampler", "decoder"))
    mesh = sharding.make_mesh(MESH)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"TrainConfig\.init_parts = \('downsampler',\): the"):
            train_state.first_state(alone, mesh)
        with pytest.warns(UserWarning, match=r"init_parts = .*: this model has no weights of down"):
            state = train_state.first_state(more, mesh)
    assert_trees_equal(state.params["decoder"], weights["decoder"])
