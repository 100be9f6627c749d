"""Declarations of weights: initial values, counts, shapes, shardings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from model_helpers import TINY, assert_trees_close

from bluelm_jax import config, decoder, params, presets, sharding, vision, vlm
from bluelm_jax.params import Param

KEY = jax.random.key(0)


@pytest.fixture(scope="module")
def made():
    return jax.jit(functools.partial(params.init, vlm.specs(TINY)))(KEY)


def test_one_axis_name_for_each_dimension():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) and axes \('embed',\) differ in length"):
        Param((2, 3), ("embed",))
    with pytest.raises(ValueError, match=r"unknown logical axes \['width'\]"):
        Param((2,), ("width",))


@pytest.mark.parametrize(
    ("param", "std"),
    [
        (Param((64, 512), ("embed", "mlp")), 1 / 8),
        (Param((64, 512), ("embed", "mlp"), gain=0.5), 1 / 16),
        (Param((3, 64, 512), ("layers", "embed", "mlp")), 1 / 8),  # The stack is no fan-in.
        (Param((4, 4, 4, 512), ("patch", "patch", None, "vision_embed")), 1 / 8),
        (Param((512, 64), ("vocab", "embed"), 0.02), 0.02),
    ],
)
def test_initial_values_have_the_declared_spread(param, std):
    values = np.asarray(params.init({"w": param}, KEY)["w"])
    assert values.std() == pytest.approx(std, rel=0.02)
    assert abs(values.mean()) < 0.02 * std
    # Cut at two standard deviations of the underlying normal, 2 / 0.8796 of the declared one.
    assert 2.1 * std < np.abs(values).max() <= 2 / 0.8796 * std


def test_zeros_and_ones():
    specs = {"z": Param((3,), ("embed",), "zeros"), "o": Param((3,), ("embed",), "ones")}
    made = params.init(specs, KEY)
    assert made["z"].tolist() == [0, 0, 0] and made["o"].tolist() == [1, 1, 1]
    assert params.init(specs, KEY, jnp.bfloat16)["o"].dtype == jnp.bfloat16


def test_a_draw_depends_on_key_and_path_only():
    w, v = Param((8, 8), ("embed", "mlp")), Param((8, 8), ("embed", "mlp"))
    small, large = {"b": {"w": w}}, {"a": v, "b": {"w": w, "x": v}, "c": v}
    first, second = params.init(small, KEY), params.init(large, KEY)
    np.testing.assert_array_equal(first["b"]["w"], second["b"]["w"])
    drawn = [np.asarray(x) for x in jax.tree.leaves(second)]
    assert len({x.tobytes() for x in drawn}) == 4
    other = params.init(small, jax.random.key(1))
    assert not np.array_equal(first["b"]["w"], other["b"]["w"])


def test_no_two_weights_of_a_model_are_drawn_alike(made):
    drawn = [np.asarray(w) for w in jax.tree.leaves(made) if np.ptp(w) > 0]
    assert len({w.ravel()[:16].tobytes() for w in drawn}) == len(drawn) > 15
    q = made["decoder"]["blocks"]["attn"]["q"]["kernel"]
    assert not np.array_equal(q[0], q[1])  # The blocks of a stack differ.


def test_init_is_the_same_under_jit():
    specs = {"a": Param((4, 6), ("embed", "mlp")), "b": Param((3,), (None,), 0.1)}
    compiled = jax.jit(functools.partial(params.init, specs))(KEY)
    assert_trees_close(compiled, params.init(specs, KEY), rtol=1e-6)


def test_stack_adds_a_leading_axis():
    block = {"a": Param((4, 6), ("embed", "mlp"), gain=0.5), "b": Param((6,), (None,), "zeros")}
    stacked = params.stack(block, 3)
    assert stacked["a"] == Param((3, 4, 6), ("layers", "embed", "mlp"), gain=0.5)
    assert stacked["b"].shape == (3, 6) and stacked["b"].axes == ("layers", None)
    assert stacked["a"].std() == block["a"].std()


def test_count_by_hand():
    block = {"a": Param((4, 6), ("embed", "mlp")), "b": Param((6,), (None,))}
    assert params.count(block) == 30
    assert params.count(params.stack(block, 3)) == 90
    assert params.count({"scalar": Param((), ())}) == 1


def test_count_is_what_init_makes(made):
    assert params.count(vlm.specs(TINY)) == sum(w.size for w in jax.tree.leaves(made))


def test_abstract_describes_what_init_makes(made):
    shapes = params.abstract(vlm.specs(TINY))
    assert jax.tree.structure(made) == jax.tree.structure(shapes)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), made, shapes)
    assert all(jax.tree.leaves(same))
    assert all(s.sharding is None for s in jax.tree.leaves(shapes))


def test_abstract_carries_shardings():
    mesh = sharding.make_mesh(config.MeshConfig(data=2, fsdp=2, tensor=2))
    shapes = params.abstract(vlm.specs(TINY), jnp.bfloat16, mesh)
    gate = shapes["decoder"]["blocks"]["mlp"]["gate"]["kernel"]
    assert gate.dtype == jnp.bfloat16
    assert gate.sharding.shard_shape(gate.shape) == (2, 16, 32)
    norm = params.shardings(vlm.specs(TINY), mesh)["decoder"]["norm"]["scale"]
    assert norm.spec == PartitionSpec("fsdp")


def test_cast():
    tree = {"a": jnp.ones(2), "b": {"c": jnp.ones(3, jnp.bfloat16)}}
    dtypes = {x.dtype.name for x in jax.tree.leaves(params.cast(tree, jnp.bfloat16))}
    assert dtypes == {"bfloat16"}


def test_a_weight_that_does_not_split_is_named():
    cfg = presets.minicpm_2b(depth=1)  # 122,753 ids: odd.
    mesh = sharding.make_mesh(config.MeshConfig(tensor=2))
    with pytest.raises(ValueError, match=r"embed.*122753.*vocab.*tensor = 2"):
        params.shardings({"decoder": decoder.specs(cfg)}, mesh)
    with pytest.raises(ValueError, match=r"embed.*122753.*vocab.*tensor = 2"):
        params.abstract({"decoder": decoder.specs(cfg)}, mesh=mesh)


def test_residual_branches_start_small():
    """Each of a tower's 2 * depth branches adds variance 1 / (2 * depth) to the stream."""
    cfg = config.VisionConfig(
        tile_size=20, patch_size=4, width=24, depth=8, mlp_dim=48, num_heads=2
    )
    for specs, out in ((vision.specs(cfg), "fc2"), (decoder.specs(TINY.decoder), "down")):
        blocks = specs["blocks"]
        depth = blocks["norm1"]["scale"].shape[0]
        assert blocks["attn"]["out"]["kernel"].gain == pytest.approx((2 * depth) ** -0.5)
        assert blocks["mlp"][out]["kernel"].gain == pytest.approx((2 * depth) ** -0.5)
