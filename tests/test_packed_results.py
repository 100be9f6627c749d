"""Packed rows give the logits and gradients of rows with one sample, through the real pipeline."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from data_helpers import record, write_image, write_json
from model_helpers import TINY, Q, assert_trees_close, make_run, replace, weights

from bluelm_jax import layout, loss, schemes, train, train_state, vlm
from bluelm_jax.batch import Batch
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import Packing

# One block each: half the compile time.
SMALL = dataclasses.replace(
    TINY,
    vision=dataclasses.replace(TINY.vision, depth=1),
    decoder=dataclasses.replace(TINY.decoder, depth=1),
)
TILING = schemes.Tiling(scheme=schemes.Relaxed(), tile_size=TINY.vision.tile_size)
ONCE = {"epochs": 1, "shuffle": False, "drop_remainder": False}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Twelve samples: one image, none, or two with text between; lengths and grids differ."""
    folder = tmp_path_factory.mktemp("mixed")
    rng = np.random.default_rng(0)
    samples = []
    for i in range(12):
        names = [
            write_image(folder, f"{i}-{k}.png", *map(int, rng.integers(16, 50, 2)), seed=9 * i + k)
            for k in range((1, 0, 2)[i % 3])
        ]
        question = " and ".join(["<image>"] * len(names)) + f"\nWhat {i}?"
        answer = "abcdefghijkl"[i] * int(rng.integers(1, 30))
        samples.append(record(f"s{i}", question, answer, **({"image": names} if names else {})))
    return write_json(folder / "mixed.json", samples)


def run_of(path, **fields):
    return replace(make_run(path, model=SMALL, data=ONCE | fields), "data", tiling=TILING)


def batches_of(path, **fields):
    run = run_of(path, **fields)
    return [Batch(**arrays) for arrays in Pipeline(run.data, side=run.token_side)]


def loss_of(p, batch):
    hidden = vlm.forward(p, batch, SMALL)
    return loss.cross_entropy(p["decoder"], hidden, batch, SMALL.decoder, 0).loss


def by_sample(p, batches):
    """Logits of every sample, by its tokens."""
    found = {}
    run = jax.jit(functools.partial(vlm.logits, cfg=SMALL))
    for batch in batches:
        out = np.asarray(run(p, batch))
        for row, segments in enumerate(np.asarray(batch.segments)):
            for segment in range(1, segments.max(initial=0) + 1):
                at = segments == segment
                key = tuple(np.asarray(batch.tokens)[row][at].tolist())
                assert key not in found
                found[key] = out[row][at]
    return found


def mean_gradient(p, batches):
    grad = jax.jit(jax.grad(loss_of))
    total = functools.reduce(
        lambda a, b: jax.tree.map(jnp.add, a, b), [grad(p, batch) for batch in batches]
    )
    tokens = sum(float(batch.loss_weights.sum()) for batch in batches)
    return jax.tree.map(lambda g: g / tokens, total)


@pytest.fixture(scope="module")
def unpacked(mixed):
    batches = batches_of(mixed, seq_len=160, batch_size=2, tile_groups=2, tiles_per_group=12)
    assert {int(batch.segments.max()) for batch in batches} == {1}
    return by_sample(weights(SMALL), batches), mean_gradient(weights(SMALL), batches)


@pytest.mark.parametrize("fit", ["best", "first"])
def test_packed_equals_unpacked(mixed, unpacked, fit):
    batches = batches_of(
        mixed, seq_len=300, batch_size=2, tile_groups=1 if fit == "best" else 2,
        tiles_per_group=24, packing=Packing(fit=fit, lookahead=6),
    )  # fmt: skip
    logits, grads = unpacked
    assert max(int(batch.segments.max()) for batch in batches) > 2
    packed = by_sample(weights(SMALL), batches)
    assert packed.keys() == logits.keys() and len(packed) == 12
    for key, want in logits.items():
        np.testing.assert_allclose(packed[key], want, atol=1e-5, rtol=0)
    assert_trees_close(mean_gradient(weights(SMALL), batches), grads, atol=1e-5, rtol=0)
    for part in ("vision", "projector", "decoder"):
        largest = max(float(jnp.abs(g).max()) for g in jax.tree.leaves(grads[part]))
        assert largest > 1e-3, part  # The tolerance is not what makes them equal.


@pytest.mark.parametrize("limit", range(40, 130, 15))
def test_a_packed_sample_is_never_cut_inside_an_image(mixed, limit):
    """Whatever the row length, every view that a row refers to is there as a whole."""
    batches = batches_of(
        mixed, seq_len=limit, batch_size=2, tiles_per_group=24, packing=Packing(lookahead=6),
        on_overlong="truncate_text",
    )  # fmt: skip
    images = 0
    for batch in batches:
        for row in range(2):
            segments = np.asarray(batch.segments[row])
            for segment in range(1, segments.max(initial=0) + 1):
                index = np.asarray(batch.image_index[row])[segments == segment]
                index = index[index >= 0]
                views = index.reshape(-1, Q)  # Fails if a view is not whole.
                np.testing.assert_array_equal(views, views[:, :1] + np.arange(Q))
                images += len(views)
    assert images > 0 or limit < 60


def test_one_compiled_step_serves_images_text_and_both(mixed):
    run = run_of(mixed, seq_len=160, batch_size=1, tiles_per_group=12)
    step = jax.jit(functools.partial(train.train_step, run=run))
    state = jax.jit(functools.partial(train_state.init_state, run))()
    kinds = set()
    packed = {"packing": Packing(lookahead=4), "seq_len": 160, "batch_size": 1}
    for batch in [
        *batches_of(mixed, seq_len=160, batch_size=1, tiles_per_group=12)[:3],
        *batches_of(mixed, tiles_per_group=12, **packed)[:3],
    ]:
        images = bool((np.asarray(batch.image_index) != layout.TEXT).any())
        kinds.add((images, int(batch.segments.max())))
        state, metrics = step(state, batch)
        assert np.isfinite(metrics["loss"]) and float(metrics["tokens"]) > 0
    assert {(True, 1), (False, 1)} < kinds and max(count for _, count in kinds) > 1
    assert step._cache_size() == 1
