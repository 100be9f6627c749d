"""Small data sets on disk for the tests of the data package."""

import json

import numpy as np
from PIL import Image

from bluelm_jax import schemes
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import DataConfig, SourceConfig

TILING = schemes.Tiling(scheme=schemes.Relaxed(), tile_size=28)
SIDE = 2  # Tokens along one side of a view, so a view has 4.


def turn(who, text):
    return {"from": who, "value": text}


def record(name, *texts, **entries):
    """A record whose turns alternate between human and gpt."""
    turns = [turn("human" if i % 2 == 0 else "gpt", text) for i, text in enumerate(texts)]
    return {"id": name, "conversations": turns, **entries}


def write_image(folder, name, width=28, height=28, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name)
    return name


def write_dataset(folder, count=10, name="train.json", text_only=(), seed=0):
    """`count` records with an image each, other than those of `text_only`; sizes vary."""
    rng = np.random.default_rng(seed)
    records = []
    for i in range(count):
        answer = "abcdefghij"[i % 10] * int(rng.integers(1, 12))
        if i in text_only:
            records.append(record(f"s{i}", f"Say {i}.", answer))
            continue
        width, height = (int(x) for x in rng.integers(20, 90, 2))
        image = write_image(folder, f"{seed}-{i}.png", width, height, seed=i)
        records.append(record(f"s{i}", "<image>\nRead it.", answer, image=image))
    return write_json(folder / name, records)


def write_json(path, records):
    path.write_text(json.dumps(records))
    return path


def make_config(path, **fields):
    sources = path if isinstance(path, tuple) else (SourceConfig(path=str(path)),)
    sizes = {"seq_len": 160, "batch_size": 4, "tiles_per_group": 40, "num_threads": 0}
    return DataConfig(sources=sources, tiling=TILING, **(sizes | fields))


def make_pipeline(path, **fields):
    return Pipeline(make_config(path, **fields), side=SIDE)


def one_example(folder, sample, **fields):
    """The example of a single record."""
    path = write_json(folder / "one.json", [sample])
    pipeline = make_pipeline(path, **fields)
    source = pipeline.config.sources[0]
    return pipeline.maker.make(pipeline.records[0][0], source, pipeline.records[0].where(0))


def take(batches, count):
    return [next(batches) for _ in range(count)]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.keys() == b.keys()
        for key in a:
            np.testing.assert_array_equal(a[key], b[key], err_msg=key)
