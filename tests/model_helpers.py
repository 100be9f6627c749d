"""Tiny models and batches for the tests of the core."""

import dataclasses
import functools
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from bluelm_jax import config, data_config, params, presets, schemes, vlm
from bluelm_jax.batch import TEXT, Batch
from bluelm_jax.run_config import RunConfig

TINY = presets.tiny()
Q = 9  # Tokens of a tile of the tiny model: 20 pixels, patches of 4, 5 x 5 padded to 6 x 6, halved.


@functools.cache
def weights(cfg=TINY, seed=0):
    """Weights of the declared spread plus noise, so that biases and norms take part in the tests."""
    return draw(vlm.specs(cfg), seed)


def draw(specs, seed=0):
    """What `params.init` would draw, plus noise; by NumPy, since compiling the draws takes longer."""
    rng = np.random.default_rng(seed)

    def one(p):
        mean, std = {"zeros": (0, 0), "ones": (1, 0)}.get(p.scale, (0, None))
        std = p.std() if std is None else std
        values = mean + std * rng.normal(size=p.shape) + 0.1 * rng.normal(size=p.shape)
        return jnp.asarray(values, jnp.float32)

    return params.map_params(one, specs)


def batch_arrays(*, rows=4, length=32, groups=1, tiles=4, size=20, vocab=280, seed=0):
    """Rows of an image sample, a text sample and padding; the image is one tile of the group."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, vocab, (rows, length)).astype(np.int32)
    segments, positions = np.zeros((2, rows, length), np.int32)
    index = np.full((rows, length), TEXT, np.int32)
    supervised = np.zeros((rows, length), np.float32)
    for row in range(rows):
        middle = int(rng.integers(Q + 4, length - 8))
        end = int(rng.integers(middle + 4, length + 1))
        for segment, (start, stop) in enumerate(((0, middle), (middle, end)), 1):
            segments[row, start:stop] = segment
            positions[row, start:stop] = np.arange(stop - start)
            supervised[row, stop - int(rng.integers(1, 4)) : stop] = 1
        if tiles:
            index[row, 1 : 1 + Q] = Q * int(rng.integers(tiles)) + np.arange(Q)
    shape = (groups, tiles, size, size, 3)
    return {
        "tokens": tokens,
        "loss_weights": supervised,
        "positions": positions,
        "segments": segments,
        "image_index": index,
        "tiles": rng.integers(0, 256, shape, dtype=np.uint8),
    }


def make_batch(**sizes):
    return Batch(**{name: jnp.asarray(x) for name, x in batch_arrays(**sizes).items()})


def make_run(path="unused.json", model=TINY, data=None, **train):
    """A run of the tiny model on fixed single tiles; `train` are fields of TrainConfig."""
    sizes = {"seq_len": 32, "batch_size": 4, "tile_groups": 1, "tiles_per_group": 4}
    data_cfg = data_config.DataConfig(
        sources=(data_config.SourceConfig(path=str(path)),),
        tiling=schemes.Tiling(scheme=schemes.Fixed(), tile_size=model.vision.tile_size),
        num_threads=0,
        **(sizes | (data or {})),
    )
    optim = config.OptimConfig(peak_lr=3e-3, warmup_steps=1)
    values = {"steps": 6, "optim": optim, "log_every": 1} | train
    return RunConfig(model=model, data=data_cfg, train=config.TrainConfig(**values))


def replace(run, part, **fields):
    """`run` with fields of run.model, run.data or run.train replaced."""
    return dataclasses.replace(run, **{part: dataclasses.replace(getattr(run, part), **fields)})


def assert_trees_close(left, right, **tolerance):
    paths, _ = jax.tree_util.tree_flatten_with_path(left)
    others = jax.tree.leaves(right)
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for (path, a), b in zip(paths, others, strict=True):
        name = jax.tree_util.keystr(path)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), err_msg=name, **tolerance)


def assert_trees_equal(left, right):
    assert_trees_close(left, right, rtol=0, atol=0)


def golden(name, value):
    """The stored value of a golden test; UPDATE_GOLDEN=1 in the environment stores `value` first."""
    path = pathlib.Path(__file__).parent / "testdata" / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(value if path.suffix != ".json" else json.dumps(value, indent=1) + "\n")
    text = path.read_text()
    return json.loads(text) if path.suffix == ".json" else text
