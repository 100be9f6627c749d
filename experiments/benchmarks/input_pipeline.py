"""Samples a second that the pipeline makes on a core, and that one TPU v5e chip would use up.

    python -m experiments.benchmarks.input_pipeline

The script writes JPEGs of smooth random pictures, as large as real ones (the sizes in
`bluelm_jax/data/assets/image_sizes.csv`), with conversations as long as LLaVA's (`llava_mix`), and
runs the whole pipeline on them: decoding, resizing, tiling, tokens (bytes), packing, the arrays of a
batch. Rates are a second of CPU time, so other programs on the machine matter little.

A chip's need follows from the FLOPs of its step (`flops.step_cost`: forward and backward of
`presets.bluelm_v_minicpm_2b` at 4,096 positions, frozen parts without gradients) at 197 bfloat16
TFLOP/s, of which the two columns take 40 % and 50 % as reached.

The last table compares the two ways from a worker process to the main one: shared memory, as runs
use it, and pickling. Workers keep prepared samples (`cache_mb`), so that little else is measured.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import tempfile
import time
from collections.abc import Sequence

import numpy as np
from absl import app, flags
from PIL import Image

from bluelm_jax import config, flops, presets, schemes
from bluelm_jax.data import workers
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import DataConfig, Packing, SourceConfig
from bluelm_jax.run_config import RunConfig
from experiments.benchmarks import llava_mix

PEAK_FLOPS = 197e12  # Of a TPU v5e chip, bfloat16 (Google's product page).
UTILISATION = (0.4, 0.5)
CAPTION_TOKENS = 30  # Median of a stage-1 caption; assumed.
GRIDS_4X4 = tuple((columns, rows) for columns in range(1, 5) for rows in range(1, 5))


@dataclasses.dataclass(frozen=True)
class Stage:
    """A training stage of the paper (tables 7 and 8): its name, tiling and what it trains."""

    name: str
    tiling: schemes.Tiling
    trainable: tuple[str, ...]


STAGES = (
    Stage(
        "stage 1, one tile",
        schemes.Tiling(scheme=schemes.Fixed()),
        ("downsampler", "projector"),
    ),
    Stage(
        "stage 2, relaxed 4x4",
        schemes.Tiling(scheme=schemes.Relaxed(grids=GRIDS_4X4)),
        ("vision", "downsampler", "projector", "decoder"),
    ),
)


def write_photo(path: pathlib.Path, size: tuple[int, int], rng: np.random.Generator) -> None:
    """A JPEG of coarse and finer smooth noise; about as many bytes a pixel as a photograph."""
    total = np.zeros((size[1], size[0], 3), np.float32)
    for cell, strength in ((64, 90), (12, 35), (3, 12)):
        coarse = tuple(max(2, side // cell) for side in size)
        noise = rng.integers(0, 256, (coarse[1], coarse[0], 3), dtype=np.uint8)
        smooth = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
        total += (np.asarray(smooth, np.float32) - 127.5) * (strength / 127.5)
    picture = Image.fromarray((total + 127.5).clip(0, 255).astype(np.uint8))
    picture.save(path, quality=90)


def write_samples(folder: pathlib.Path, count: int, captions: bool) -> pathlib.Path:
    """A LLaVA JSON of `count` samples; a byte of text is a token."""
    rng = np.random.default_rng(0)
    sizes, shares = llava_mix.image_sizes(), [kind.share for kind in llava_mix.KINDS]
    records = []
    for i in range(count):
        kind = llava_mix.KINDS[rng.choice(len(shares), p=shares)]
        tokens = llava_mix.text_tokens(rng, kind)
        if captions:
            kind, tokens = llava_mix.KINDS[0], int(CAPTION_TOKENS * np.exp(rng.normal(0, 0.5)))
        record: dict = {"id": str(i)}
        question = "x" * (tokens // 3)
        if kind.image:
            record["image"] = f"{i}.jpg"
            question = f"<image>\n{question}"
            if not (folder / record["image"]).exists():
                write_photo(folder / record["image"], sizes[rng.integers(len(sizes))], rng)
        answer = "y" * max(1, tokens - tokens // 3)
        record["conversations"] = [
            {"from": "human", "value": question},
            {"from": "gpt", "value": answer},
        ]
        records.append(record)
    path = folder / f"{'captions' if captions else 'mixture'}.json"
    path.write_text(json.dumps(records))
    return path


def make_data(path: pathlib.Path, tiling: schemes.Tiling, rows: int) -> DataConfig:
    """Packed batches at 4,096 positions, in this process alone; tiles a group are measured."""
    data = DataConfig(
        sources=(SourceConfig(path=str(path)),), tiling=tiling, seq_len=4096, batch_size=rows,
        tiles_per_group=0, packing=Packing(), num_threads=0,
    )  # fmt: skip
    found = Pipeline(data, side=14).measure_packing(600)
    return dataclasses.replace(data, tiles_per_group=found.tiles_per_group)


def pipeline_rate(data: DataConfig, batches: int) -> tuple[float, float, dict[str, int]]:
    """(samples a CPU second, samples a batch, counts) over `batches` after the first."""
    iterator = iter(Pipeline(data, side=14))
    next(iterator)
    first, start = iterator.counters.counts["samples"], time.process_time()
    for _ in itertools.islice(iterator, batches):
        pass
    seconds = time.process_time() - start
    samples = iterator.counters.counts["samples"] - first
    counts = dict(iterator.counters.counts)
    iterator.close()
    return samples / seconds, samples / batches, counts


def step_flops(stage: Stage, data: DataConfig) -> int:
    """FLOPs of one step on a batch of `data`."""
    steps = config.TrainConfig(steps=10**4, trainable=stage.trainable, logits_chunk=512)
    run = RunConfig(model=presets.bluelm_v_minicpm_2b(), data=data, train=steps)
    return flops.step_cost(run).step_flops


def stage_table(paths: Sequence[pathlib.Path], rows: int, batches: int) -> None:
    """Prints what the pipeline makes and what a chip needs, a line for each stage."""
    print(
        f"{'':22}{'I/row':>6}{'samples/row':>12}{'TFLOP/row':>10}{'samples/s a core':>18}"
        f"{'a chip needs':>16}{'cores a chip':>18}"
    )
    for stage, path in zip(STAGES, paths, strict=True):
        data = make_data(path, stage.tiling, rows)
        rate, samples, _ = pipeline_rate(data, batches)
        cost = step_flops(stage, data)
        needs = [samples * PEAK_FLOPS * share / cost for share in UTILISATION]
        print(
            f"{stage.name:22}{data.tiles_per_group / rows:6.1f}{samples / rows:12.2f}"
            f"{cost / rows / 1e12:10.1f}{rate:18.1f}"
            f"{needs[0]:8.2f} ..{needs[1]:5.2f}{needs[0] / rate:9.3f} ..{needs[1] / rate:6.3f}"
        )


def transport_table(path: pathlib.Path, rows: int, prepared: int, count: int = 600) -> None:
    """Prints the rates of one worker process by way of its samples to the main one."""
    print(f"\n{'one worker, prepared samples':30}{'samples/s':>10}{'main process, CPU ms':>22}")
    data = make_data(path, STAGES[1].tiling, rows)
    data = dataclasses.replace(data, num_workers=1, cache_mb=10**5)
    shared = workers.LEAST_SHARED_BYTES
    for name, least in (("shared memory", shared), ("pickled", 2**62)) * 2:
        workers.LEAST_SHARED_BYTES = least
        stream = workers.open_stream(Pipeline(data, side=14).examples(), 0, data)
        for _ in range(
            prepared + 40
        ):  # Until all have been prepared, what was read ahead included.
            next(stream)
        start, wall = time.process_time(), time.perf_counter()
        for _ in range(count):
            next(stream)
        wall, seconds = time.perf_counter() - wall, time.process_time() - start
        stream.close()  # pyright: ignore[reportAttributeAccessIssue]
        print(f"{name:30}{count / wall:10.1f}{1e3 * seconds / count:22.2f}")
    workers.LEAST_SHARED_BYTES = shared


def main(_: list[str]) -> None:
    """Prints both tables."""
    rows, batches = flags.FLAGS.rows, flags.FLAGS.batches
    with tempfile.TemporaryDirectory() as folder:
        paths = [write_samples(pathlib.Path(folder), flags.FLAGS.samples, c) for c in (True, False)]
        stage_table(paths, rows, batches)
        transport_table(paths[1], rows, flags.FLAGS.samples)


if __name__ == "__main__":
    flags.DEFINE_integer("samples", 300, "Samples on disk; read again and again.", lower_bound=20)
    flags.DEFINE_integer("rows", 8, "Rows of a batch.", lower_bound=1)
    flags.DEFINE_integer("batches", 12, "Timed batches.", lower_bound=1)
    app.run(main)
