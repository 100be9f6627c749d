"""Logical axes, the mesh, and a training step on eight devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from model_helpers import TINY, assert_trees_close, batch_arrays, make_run, replace, weights

from bluelm_jax import config, params, sharding, train, train_state, vlm
from bluelm_jax.params import Param

MESH = config.MeshConfig(data=2, fsdp=2, tensor=2)


@functools.cache
def mesh_of(data, fsdp, tensor, devices=8):
    cfg = config.MeshConfig(data=data, fsdp=fsdp, tensor=tensor)
    return sharding.make_mesh(cfg, jax.devices()[:devices])


def test_partition_spec():
    spec = sharding.partition_spec(("batch", "seq", None, "heads"))
    assert spec == PartitionSpec(("data", "fsdp"), None, None, "tensor")


def test_unknown_axes_raise_and_are_named():
    with pytest.raises(ValueError, match=r"unknown logical axes \['head'\]; known: \['batch'"):
        sharding.partition_spec(("batch", "head"))
    with pytest.raises(ValueError, match="unknown logical axes"):
        sharding.shard(jnp.ones((2, 2)), "batch", "width")  # Without a mesh, too.


def test_shard_wants_a_name_for_each_dimension():
    with pytest.raises(ValueError, match=r"2 axis names .* for an array of shape \(2,\)"):
        sharding.shard(jnp.ones(2), "batch", "seq")


def test_shard_is_the_identity_without_a_mesh():
    x = jnp.ones((4, 2))
    assert sharding.shard(x, "batch", "seq") is x


def test_shard_constrains_under_a_mesh():
    with jax.set_mesh(mesh_of(2, 2, 2)):
        y = jax.jit(lambda x: sharding.shard(x + 1, "batch", "seq"))(jnp.ones((8, 2)))
    assert y.sharding.shard_shape(y.shape) == (2, 2)


@pytest.mark.parametrize(
    ("cfg", "shape"),
    [
        (config.MeshConfig(), (8, 1, 1)),
        (config.MeshConfig(fsdp=2), (4, 2, 1)),
        (config.MeshConfig(fsdp=2, tensor=4), (1, 2, 4)),
        (MESH, (2, 2, 2)),
    ],
)
def test_mesh_shapes(cfg, shape):
    mesh = sharding.make_mesh(cfg)
    assert mesh.axis_names == ("data", "fsdp", "tensor") and mesh.devices.shape == shape
    assert len(set(mesh.devices.flat)) == 8
    assert sharding.data_parallelism(mesh) == shape[0] * shape[1]


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (config.MeshConfig(data=3), "mesh data=3 x fsdp=1 x tensor=1 needs 3 devices, there are 8"),
        (config.MeshConfig(fsdp=3), "mesh data=2 x fsdp=3 x tensor=1 needs 6 devices, there are 8"),
        (config.MeshConfig(fsdp=16), "fsdp=16 x tensor=1 needs 16 devices, there are 8"),
    ],
)
def test_mesh_that_does_not_fit(cfg, message):
    with pytest.raises(ValueError, match=message):
        sharding.make_mesh(cfg)


def test_mesh_of_some_devices():
    assert mesh_of(-1, 2, 1, devices=4).devices.shape == (2, 2, 1)


def test_indivisible_sizes_are_named():
    mesh = mesh_of(2, 2, 2)
    sharding.check_divisible("w", (4, 6, 5), ("batch", "heads", None), mesh)
    with pytest.raises(
        ValueError, match="w: 6 along 'batch' does not split evenly over data = 2 x"
    ):
        sharding.check_divisible("w", (6,), ("batch",), mesh)
    with pytest.raises(ValueError, match="w: 5 along 'mlp' does not split evenly over tensor = 2"):
        sharding.check_divisible("w", (4, 5), ("embed", "mlp"), mesh)


def test_every_matrix_of_the_model_is_split():
    """On 2 x 2 x 2 devices a weight matrix lies in four pieces, or two beside an unsplit axis."""
    mesh = mesh_of(2, 2, 2)
    shapes = params.abstract(vlm.specs(TINY), mesh=mesh)
    whole = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, s in jax.tree_util.tree_leaves_with_path(shapes)
        if len(s.shape) > 1 and s.sharding.shard_shape(s.shape) == s.shape
    }
    assert whole == set()


# A training step -----------------------------------------------------------------------------------


def sharded_run(**fields):
    """eps = 1 keeps Adam's first update in proportion to the gradient, so noise stays noise."""
    run = make_run(data={"batch_size": 8, "tile_groups": 4, "tiles_per_group": 2}, **fields)
    optim = config.OptimConfig(peak_lr=0.1, warmup_steps=0, eps=1.0, vision_layer_decay=0.9)
    return replace(run, "train", optim=optim)


ARRAYS = batch_arrays(rows=8, groups=4, tiles=2, seed=3)


def one_step(run, mesh):
    with jax.set_mesh(mesh):
        state = jax.device_put(
            train_state.init_state(run, weights(run.model)), train_state.state_shardings(run, mesh)
        )
        step = jax.jit(
            functools.partial(train.train_step, run=run),
            out_shardings=(train_state.state_shardings(run, mesh), None),
        )
        return step(state, train.device_batch(ARRAYS, mesh))


@pytest.fixture(scope="module")
def alone():
    return one_step(sharded_run(), mesh_of(1, 1, 1, devices=1))


@pytest.mark.parametrize("shape", [(2, 2, 2), (4, 1, 2)])
def test_a_sharded_step_equals_the_step_of_one_device(alone, shape):
    state, metrics = one_step(sharded_run(), mesh_of(*shape))
    for name, value in alone[1].items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-6, err_msg=name)
    assert_trees_close(state.params, alone[0].params, rtol=0, atol=2e-6)
    assert_trees_close(state.opt_state, alone[0].opt_state, rtol=0, atol=2e-6)
    gate = state.params["decoder"]["blocks"]["mlp"]["gate"]["kernel"]
    assert gate.shape == (2, 32, 64)
    assert {s.data.shape for s in gate.addressable_shards} == {(2, 32 // shape[1], 32)}
    moments = [
        leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.opt_state)
        if "'gate'" in jax.tree_util.keystr(path)
    ]  # fmt: skip
    assert [m.sharding for m in moments] == [gate.sharding] * 2


def test_a_weight_is_drawn_alike_on_every_mesh():
    specs = {"w": Param((6, 8), ("embed", "mlp")), "v": Param((4, 2), ("vocab", None))}
    draw = functools.partial(params.init, specs)
    there = jax.jit(draw, out_shardings=params.shardings(specs, mesh_of(2, 2, 2)))
    drawn = there(jax.random.key(0))
    assert drawn["w"].sharding.shard_shape((6, 8)) == (3, 4)
    assert_trees_close(drawn, draw(jax.random.key(0)), rtol=0, atol=1e-7)


def test_batches_are_split_over_the_data_axes():
    mesh = mesh_of(2, 2, 2)
    batch = train.device_batch(ARRAYS, mesh)
    assert {s.data.shape for s in batch.tokens.addressable_shards} == {(2, 32)}
    assert {s.data.shape for s in batch.tiles.addressable_shards} == {(1, 2, 20, 20, 3)}
    np.testing.assert_array_equal(batch.tokens, ARRAYS["tokens"])


@pytest.mark.parametrize(
    ("data", "accumulation", "message"),
    [
        ({"batch_size": 6, "tile_groups": 1}, 1, r"data.batch_size = 6 over all hosts .* = 4"),
        ({"batch_size": 8, "tile_groups": 2}, 1, r"data.tile_groups = 2 over all hosts .* = 4"),
        ({"batch_size": 8, "tile_groups": 4}, 2, r"data.tile_groups = 4 over all hosts .* = 8"),
    ],
)
def test_rows_and_groups_must_split(data, accumulation, message):
    run = make_run(data=data, accumulation=accumulation)
    with pytest.raises(ValueError, match=message):
        train.check_mesh(run, mesh_of(2, 2, 2))


def test_rows_and_groups_that_split():
    run = make_run(data={"batch_size": 16, "tile_groups": 8}, accumulation=2)
    train.check_mesh(run, mesh_of(2, 2, 2))
