"""Schedule, weight decay, layer-wise learning rates, frozen parts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, draw

from bluelm_jax import config, decoder, optim, vlm

CFG = dataclasses.replace(
    TINY,
    newline=True,
    decoder=dataclasses.replace(TINY.decoder, qkv_bias=True, embed_norm=True),
)
SPECS = vlm.specs(CFG)


def paths(tree, wanted):
    """Paths of the leaves for which `wanted` holds."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, bool))
    return {jax.tree_util.keystr(p, simple=True, separator="/") for p, leaf in flat if wanted(leaf)}


def test_schedule_values():
    cfg = config.OptimConfig(peak_lr=2e-3, warmup_steps=10, final_lr_ratio=0.1)
    lr = optim.schedule(cfg, 110)
    expected = {0: 0.0, 1: 2e-4, 5: 1e-3, 10: 2e-3, 110: 2e-4, 200: 2e-4}
    expected[60] = 2e-4 + 0.5 * (2e-3 - 2e-4)  # Half way through the cosine.
    expected[35] = 2e-4 + (0.5 + 0.5 * np.cos(np.pi / 4)) * (2e-3 - 2e-4)
    for step, value in expected.items():
        assert float(lr(step)) == pytest.approx(value, rel=1e-5, abs=1e-9), step


def test_schedule_without_warm_up_starts_at_the_peak():
    lr = optim.schedule(config.OptimConfig(peak_lr=1e-2, warmup_steps=0), 10)
    assert [float(lr(s)) for s in (0, 5, 10)] == pytest.approx([1e-2, 5e-3, 0.0], abs=1e-9)


def test_warm_up_longer_than_the_run():
    with pytest.raises(ValueError, match="warmup_steps = 10: must be < steps = 10"):
        optim.schedule(config.OptimConfig(warmup_steps=10), 10)


def test_decay_reaches_matrices_only():
    decayed = paths(optim.decay_mask(SPECS), lambda leaf: leaf)
    blocks = {
        "vision": ("attn/q", "attn/k", "attn/v", "attn/out", "mlp/fc1", "mlp/fc2"),
        "decoder": ("attn/q", "attn/k", "attn/v", "attn/out", "mlp/gate", "mlp/up", "mlp/down"),
    }
    expected = {f"{part}/blocks/{w}/kernel" for part, ws in blocks.items() for w in ws}
    expected |= {"vision/patch/kernel", "downsampler/fuse/kernel", "decoder/embed", "decoder/head"}
    expected |= {"projector/fc1/kernel", "projector/fc2/kernel"}
    assert decayed == expected
    others = paths(optim.decay_mask(SPECS), lambda leaf: not leaf)
    assert {"newline", "vision/position", "decoder/norm/scale"} <= others
    assert all("bias" in p or "scale" in p for p in others - {"newline", "vision/position"})


def test_layer_wise_factors_literally():
    scales = optim.vision_layer_scales(SPECS, 0.5)
    vision = scales["vision"]
    for leaf in jax.tree.leaves(vision["blocks"]):
        assert leaf.shape[0] == 2 and leaf.ravel().tolist() == [0.25, 0.5]  # Two blocks.
    for leaf in jax.tree.leaves((vision["patch"], vision["position"])):
        assert leaf.ravel().tolist() == [0.125]
    rest = (vision["norm"], {k: v for k, v in scales.items() if k != "vision"})
    assert all(leaf.ravel().tolist() == [1.0] for leaf in jax.tree.leaves(rest))


def test_layer_wise_factors_without_a_tower():
    specs = {"decoder": SPECS["decoder"]}
    assert {
        float(s.ravel()[0]) for s in jax.tree.leaves(optim.vision_layer_scales(specs, 0.5))
    } == {1}


def reference_step(cfg, lr, w, g, decays):
    """AdamW's first step from zero moments, after clipping by the norm of all gradients."""
    norm = np.sqrt(sum((x**2).sum() for x in g.values()))
    factor = 1.0 if cfg.clip_norm is None else min(1.0, cfg.clip_norm / norm)
    new = {}
    for name in w:
        x = g[name] * factor
        m, v = (1 - cfg.b1) * x / (1 - cfg.b1), (1 - cfg.b2) * x**2 / (1 - cfg.b2)
        update = m / (np.sqrt(v) + cfg.eps) + (cfg.weight_decay * w[name] if decays[name] else 0)
        new[name] = w[name] - lr * update
    return new


@pytest.mark.parametrize("clip", [None, 0.5, 1e6])
def test_first_step_by_hand(clip):
    specs = {"kernel": decoder.Param((3, 4), ("embed", "mlp"))}
    specs["bias"] = decoder.Param((4,), ("mlp",), "zeros", decay=False)
    cfg = config.OptimConfig(
        peak_lr=0.1, warmup_steps=0, weight_decay=0.3, clip_norm=clip, eps=0.05
    )
    rng = np.random.default_rng(0)
    w, g = ({k: rng.normal(size=p.shape) for k, p in specs.items()} for _ in range(2))
    optimizer = optim.make_optimizer(cfg, 10, specs)
    arrays = [jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree) for tree in (w, g)]
    updates, _ = optimizer.update(arrays[1], optimizer.init(arrays[0]), arrays[0])
    expected = reference_step(cfg, 0.1, w, g, {"kernel": True, "bias": False})
    for name in specs:
        np.testing.assert_allclose(arrays[0][name] + updates[name], expected[name], atol=1e-6)


def test_layer_decay_scales_the_whole_update():
    """With equal gradients everywhere, a block's update is its factor times that of the norm."""
    specs = {"vision": SPECS["vision"]}
    cfg = config.OptimConfig(
        peak_lr=0.1, warmup_steps=0, weight_decay=0, clip_norm=None, vision_layer_decay=0.5
    )
    optimizer = optim.make_optimizer(cfg, 10, specs)
    weights = draw(specs)
    ones = jax.tree.map(jnp.ones_like, weights)
    updates = optimizer.update(ones, optimizer.init(weights), weights)[0]["vision"]
    full = float(updates["norm"]["scale"][0])
    assert full == pytest.approx(-0.1, rel=1e-4)
    fc1 = updates["blocks"]["mlp"]["fc1"]["kernel"]
    np.testing.assert_allclose(fc1[0], 0.25 * full, rtol=1e-6)
    np.testing.assert_allclose(fc1[1], 0.5 * full, rtol=1e-6)
    np.testing.assert_allclose(updates["position"], 0.125 * full, rtol=1e-6)


def test_partition():
    tree = {"vision": 1, "projector": 2, "decoder": 3}
    trained, frozen = optim.partition(tree, ("projector", "newline"))
    assert trained == {"projector": 2} and frozen == {"vision": 1, "decoder": 3}
    with pytest.raises(ValueError, match=r"trainable = \('newline',\): the model has only \['deco"):
        optim.partition(tree, ("newline",))


def test_global_norm():
    tree = {"a": jnp.array([3.0]), "b": {"c": jnp.array([[4.0, 12.0]])}}
    assert float(optim.global_norm(tree)) == 13
