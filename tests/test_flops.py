"""Counted costs against counts by hand, and against what the compiler counts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from model_helpers import TINY

from bluelm_jax import (
    config,
    data_config,
    flops,
    loss,
    optim,
    params,
    presets,
    run_config,
    schemes,
    vlm,
)


def abstract(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def test_products_and_convolutions():
    a, b = abstract(3, 5), abstract(5, 7)
    assert flops.matmul_flops(jnp.matmul, a, b) == 2 * 3 * 5 * 7
    batched = functools.partial(jnp.einsum, "bij,bjk->bik")
    assert flops.matmul_flops(batched, abstract(4, 3, 5), abstract(4, 5, 7)) == 4 * 2 * 3 * 5 * 7

    def conv(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=numbers)

    x, kernel = abstract(2, 9, 9, 3), abstract(3, 3, 3, 8)
    assert flops.matmul_flops(conv, x, kernel) == 2 * (2 * 4 * 4 * 8) * (3 * 3 * 3)


def test_loops_count_each_step_and_remat_counts_the_recomputation():
    w = abstract(6, 4, 4)

    def loop(x, w, wrap=lambda f: f):
        step = wrap(lambda x, w: (jnp.sin(x @ w), None))
        return jax.lax.scan(step, x, w)[0].sum()

    x, one = abstract(2, 4), 2 * 2 * 4 * 4
    assert flops.matmul_flops(loop, x, w) == 6 * one
    both = functools.partial(jax.grad(loop, (0, 1)))
    assert flops.matmul_flops(both, x, w) == 3 * 6 * one
    again = jax.grad(functools.partial(loop, wrap=jax.checkpoint), (0, 1))
    assert flops.matmul_flops(again, x, w) == 4 * 6 * one


def test_forward_by_hand():
    """Every matrix of the model once for each position, patch or token it meets, and attention."""
    model, length, tiles = TINY, 40, 3
    vision, decoder = model.vision, model.decoder
    patches, tokens = vision.side**2, 9  # 5 x 5 patches -> 3 x 3 tokens
    per_patch = vision.patch_size**2 * 3 * vision.width
    per_patch += vision.depth * (4 * vision.width**2 + 2 * vision.width * vision.mlp_dim)
    per_patch += vision.depth * 2 * vision.width * patches  # q k^T and the weighted sum of v
    per_token = 4 * vision.width * vision.width  # the downsampler
    per_token += vision.width * decoder.width + decoder.width**2
    heads, kv = (n * decoder.head_dim for n in (decoder.num_heads, decoder.num_kv_heads))
    per_position = 2 * decoder.width * (heads + kv) + 3 * decoder.width * decoder.mlp_dim
    per_position = decoder.depth * (per_position + 2 * heads * length)
    per_position += decoder.width * decoder.vocab_size
    total = tiles * (patches * per_patch + tokens * per_token) + length * per_position
    assert flops.forward_flops(model, length, tiles) == 2 * total


def tiny_run(**train) -> run_config.RunConfig:
    data = data_config.DataConfig(
        tiling=schemes.Tiling(scheme=schemes.Fixed(), tile_size=TINY.vision.tile_size),
        seq_len=40,
        batch_size=4,
        tile_groups=2,
        tiles_per_group=3,
    )
    optimizer = config.OptimConfig(warmup_steps=0)
    values = {"steps": 2, "optim": optimizer, "logits_chunk": 0, **train}
    return run_config.RunConfig(model=TINY, data=data, train=config.TrainConfig(**values))


def test_step_counts_a_micro_batch():
    whole = flops.step_cost(tiny_run())
    half = flops.step_cost(tiny_run(accumulation=2))
    assert whole.forward_flops == 2 * half.forward_flops
    alone = flops.forward_flops(TINY, 40, 3)
    assert 2 * alone < whole.forward_flops < 4 * alone  # Four rows share six tiles.
    assert 2.5 < whole.step_flops / whole.forward_flops <= 3


def test_frozen_parts_cost_no_weight_gradients():
    everything = flops.step_cost(tiny_run())
    projector = flops.step_cost(tiny_run(trainable=("downsampler", "projector")))
    assert projector.forward_flops == everything.forward_flops
    assert projector.forward_flops < projector.step_flops < 0.8 * everything.step_flops
    assert projector.kept_bytes < everything.kept_bytes


def test_kept_bytes_by_hand():
    """sin keeps cos x, the product keeps its left side; its right side is an argument."""
    x, w = abstract(3, 4), abstract(4, 5)

    def f(x, w):
        return (jnp.sin(x) @ w).sum()

    assert flops.kept_bytes(f, x, w) == 4 * 12
    assert flops.kept_bytes(lambda both: f(*both), (x, w)) == 4 * (12 + 12)


def test_remat_keeps_less():
    run = tiny_run()
    remat = {
        part: dataclasses.replace(getattr(TINY, part), remat=True) for part in ("vision", "decoder")
    }
    rematted = dataclasses.replace(run, model=dataclasses.replace(TINY, **remat))
    assert flops.step_cost(rematted).kept_bytes < 0.5 * flops.step_cost(run).kept_bytes
    assert flops.step_cost(rematted).step_flops > flops.step_cost(run).step_flops


def test_the_compiler_counts_the_same_products():
    """XLA's own count of a step, which has elementwise work on top and counts a loop's body once."""
    unrolled = {
        part: dataclasses.replace(getattr(TINY, part), unroll=getattr(TINY, part).depth)
        for part in ("vision", "decoder")
    }
    model = dataclasses.replace(TINY, **unrolled)
    run = dataclasses.replace(tiny_run(), model=model)
    weights = params.abstract(vlm.specs(model))
    batch = flops.abstract_batch(model, 4, 40, 2, 3)

    def value(p, batch):
        return loss.cross_entropy(
            p["decoder"], vlm.forward(p, batch, model), batch, model.decoder
        ).loss

    trained, _ = optim.partition(weights, run.train.trainable)
    compiled = jax.jit(jax.grad(value)).lower(trained, batch).compile()
    assert flops.step_cost(run).step_flops == pytest.approx(
        compiled.cost_analysis()["flops"], rel=0.15
    )


def test_full_size_in_the_usual_approximation():
    """2 x parameters x positions, and the ViT's likewise, up to attention and the small parts."""
    model = presets.bluelm_v_minicpm_2b()
    sizes = {part: params.count(tree) for part, tree in vlm.specs(model).items()}
    usual = 2 * (4096 * sizes["decoder"] + 9 * model.vision.side**2 * sizes["vision"])
    assert 1.0 < flops.forward_flops(model, 4096, 9) / usual < 1.2
