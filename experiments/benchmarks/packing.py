"""Packing: how full batches are, and tokens a second against rows with one sample each.

    python -m experiments.benchmarks.packing

First table: shares of positions and of tile slots in use on a mixture with LLaVA-665k's lengths
(`llava_mix`) at 4,096 positions and 196 tokens a tile, by rule of packing and tiles a group. A tile
slot is one of the I tiles that every group of a batch has room for; all of them go through the ViT.
Where no number is given, I is what `measure.choose_tiles` finds.

Second table: training steps of a small model on this machine, packed and padded in turn, in one
process. Everything is scaled by 196 / 16: 16 tokens a tile, texts and rows shorter by as much, and
the ViT has the share of the weights that SigLIP has beside MiniCPM-2B. Padded rows are as long as
the packed ones, or as the longest sample; their tiles a group are what the fullest batch needs.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import app, flags

from bluelm_jax import config, data_config, layout, schemes, train, train_state
from bluelm_jax.batch import Batch
from bluelm_jax.data import batching, measure, packing
from bluelm_jax.data.examples import Example
from bluelm_jax.data.packing import Size
from bluelm_jax.data_config import Packing
from bluelm_jax.run_config import RunConfig
from experiments.benchmarks import llava_mix

SEQ_LEN, SIDE, SMALL_SIDE = 4096, 14, 4
SCALE = SMALL_SIDE**2 / SIDE**2
TILING = schemes.Tiling(scheme=schemes.Relaxed())
RULES = (
    Packing(fit="first", lookahead=16),
    Packing(fit="first", lookahead=64),
    Packing(fit="best", lookahead=16),
    Packing(fit="best", lookahead=32),
    Packing(),
    Packing(fit="best", lookahead=128),
)


def make_shape(seq_len: int, side: int, rows: int, tiles: int = 0) -> batching.BatchShape:
    """Batches of `rows` rows in one group."""
    return batching.BatchShape(
        batch_size=rows, seq_len=seq_len, tile_groups=1, tiles_per_group=tiles, tile_size=8 * side,
        tokens_per_view=side * side, max_samples_per_row=None,
    )  # fmt: skip


def _print_fill(name: str, rows: int, found: measure.Fill, seconds: float, count: int) -> None:
    goal = "yes" if found.margin >= 0 else "no"
    print(
        f"{name:18}{rows:6}{found.tiles_per_group:6}{found.tiles_per_group / rows:8.2f}"
        f"{found.position_fill:11.1%}{found.tile_fill:9.1%}   {goal:5}{1e3 * seconds / count:8.2f}"
    )


def fill_table(sizes: Sequence[Size]) -> None:
    """Prints the first table."""
    mean_length, mean_views = np.mean(sizes, axis=0)
    print(
        f"{len(sizes)} samples: {mean_length:.0f} positions and {mean_views:.2f} tiles on average, "
        f"{mean_views / mean_length * SEQ_LEN:.2f} tiles on {SEQ_LEN} positions\n"
        f"{'rule, look-ahead':18}{'rows':>6}{'I':>6}{'I/row':>8}{'positions':>11}{'tiles':>9}"
        f"   {'goal':5}{'ms/sample':>8}"
    )
    for rows in (1, 4, 8):
        for rule in RULES if rows == 8 else (Packing(),):
            shape = make_shape(SEQ_LEN, SIDE, rows)
            tiles = measure.choose_tiles(sizes, shape, rule).tiles_per_group
            near = (tiles - 8, tiles - 4, tiles, tiles + 4, tiles + 8)
            for each in near if rule == Packing() and rows == 8 else (tiles,):
                start = time.process_time()
                fixed = dataclasses.replace(shape, tiles_per_group=each)
                found = measure.fill(sizes, fixed, rule)
                seconds = time.process_time() - start
                _print_fill(f"{rule.fit}, {rule.lookahead}", rows, found, seconds, len(sizes))


def make_example(size: Size, shape: batching.BatchShape, rng: np.random.Generator) -> Example:
    """A sample of a size: its images, then text, of which the latter half is supervised."""
    image = size.num_views * shape.tokens_per_view
    index = np.full(size.length, layout.TEXT, np.int32)
    index[:image] = np.arange(image)
    side = shape.tile_size
    return Example(
        name="made",
        tokens=rng.integers(0, 250, size.length).astype(np.int32),
        supervised=np.arange(size.length) >= (image + size.length) // 2,
        image_index=index,
        tiles=rng.integers(0, 256, (size.num_views, side, side, 3), dtype=np.uint8),
    )


def make_batches(
    sizes: Sequence[Size], shape: batching.BatchShape, rule: Packing | None
) -> Iterator[Batch]:
    """Batches of the samples, by the packer and the assembly that runs use."""
    rng, stream, queue = np.random.default_rng(0), iter(sizes), []
    while True:
        filled = packing.fill(shape, rule, queue, lambda: next(stream, None))
        queue = filled.waiting
        placed = [(row, make_example(size, shape, rng)) for row, size in filled.placed]
        yield Batch(**jax.device_put(batching.assemble(placed, shape)))


def small_run(shape: batching.BatchShape) -> RunConfig:
    """A decoder of 0.9M weights and a ViT of 0.15M, all trained."""
    vision = config.VisionConfig(
        tile_size=shape.tile_size, patch_size=4, width=64, depth=3, mlp_dim=256, num_heads=4
    )
    decoder = config.DecoderConfig(
        vocab_size=280, width=128, depth=4, mlp_dim=384, num_heads=4, num_kv_heads=4, head_dim=32,
        max_length=SEQ_LEN,
    )  # fmt: skip
    data = data_config.DataConfig(
        tiling=dataclasses.replace(TILING, tile_size=shape.tile_size), seq_len=shape.seq_len,
        batch_size=shape.batch_size, tiles_per_group=shape.tiles_per_group,
    )  # fmt: skip
    model = config.VLMConfig(vision=vision, decoder=decoder)
    return RunConfig(model=model, data=data, train=config.TrainConfig(steps=10**4))


@dataclasses.dataclass
class Arm:
    """One way to batch: its compiled step and what the steps took."""

    name: str
    shape: batching.BatchShape
    step: Any
    state: Any
    batches: Iterator[Batch]
    seconds: list[float] = dataclasses.field(default_factory=list)
    cpu_seconds: list[float] = dataclasses.field(default_factory=list)
    tokens: list[int] = dataclasses.field(default_factory=list)
    supervised: list[int] = dataclasses.field(default_factory=list)

    def run(self) -> None:
        """One timed step; a first one compiles and does not count."""
        batch = next(self.batches)
        start, cpu = time.perf_counter(), time.process_time()
        self.state, metrics = jax.block_until_ready(self.step(self.state, batch))
        self.seconds.append(time.perf_counter() - start)
        self.cpu_seconds.append(time.process_time() - cpu)
        self.tokens.append(int((np.asarray(batch.segments) > 0).sum()))
        self.supervised.append(int(metrics["tokens"]))

    def rates(self) -> np.ndarray:
        """Real tokens a second, and real and supervised ones a CPU second, from the median step."""
        second, cpu = np.median(self.seconds[1:]), np.median(self.cpu_seconds[1:])
        tokens = np.mean(self.tokens[1:])
        return np.array([tokens / second, tokens / cpu, np.mean(self.supervised[1:]) / cpu])


def make_arm(name: str, sizes: Sequence[Size], seq_len: int, rule: Packing | None) -> Arm:
    """An arm with the tiles a group that it needs."""
    rows = flags.FLAGS.rows
    shape = make_shape(seq_len, SMALL_SIDE, rows)
    if rule is None:
        shape = dataclasses.replace(shape, max_samples_per_row=1)
        views = np.array([size.num_views for size in sizes])
        tiles = int(views[: len(views) // rows * rows].reshape(-1, rows).sum(axis=1).max())
    else:
        tiles = measure.choose_tiles(sizes, shape, rule).tiles_per_group
    shape = dataclasses.replace(shape, tiles_per_group=tiles)
    run = small_run(shape)
    step = jax.jit(functools.partial(train.train_step, run=run), donate_argnums=0)
    state = jax.jit(functools.partial(train_state.init_state, run))()
    return Arm(name, shape, step, state, make_batches(sizes, shape, rule))


def speed_table(sizes: Sequence[Size], steps: int) -> None:
    """Prints the second table."""
    seq_len = round(SEQ_LEN * SCALE)
    longest = max(size.length for size in sizes)
    arms = [
        make_arm("packed", sizes, seq_len, Packing()),
        make_arm("padded to the row", sizes, seq_len, None),
        make_arm("padded to longest", sizes, longest, None),
    ]
    for _ in range(steps + 1):
        for arm in arms:
            arm.run()
    print(
        f"\n{'':20}{'L':>5}{'I':>5}{'ms/step':>9}{'positions':>11}{'tokens/s':>10}"
        f"{'/CPU s':>8}{'supervised/CPU s':>18}   packed is: by s, CPU s, supervised"
    )
    packed = arms[0].rates()
    for arm in arms:
        rates, shape = arm.rates(), arm.shape
        fill = np.mean(arm.tokens[1:]) / (shape.batch_size * shape.seq_len)
        print(
            f"{arm.name:20}{shape.seq_len:5}{shape.tiles_per_group:5}"
            f"{1e3 * np.median(arm.seconds[1:]):9.0f}{fill:11.1%}{rates[0]:10.0f}{rates[1]:8.0f}"
            f"{rates[2]:18.0f}      " + "".join(f"{x:9.2f}x" for x in packed / rates)
        )


def main(_: list[str]) -> None:
    """Prints both tables."""
    fill_table(llava_mix.draw(flags.FLAGS.samples, TILING, SIDE))
    # The grids are those of tiles of 384 pixels; only the tokens of a tile are fewer.
    sizes = llava_mix.draw(flags.FLAGS.samples, TILING, SMALL_SIDE, text_scale=SCALE)
    speed_table(sizes, flags.FLAGS.steps)


if __name__ == "__main__":
    flags.DEFINE_integer("samples", 2000, "Samples of the mixture.", lower_bound=100)
    flags.DEFINE_integer("rows", 8, "Rows of a batch in the second table.", lower_bound=1)
    flags.DEFINE_integer("steps", 8, "Timed steps of each arm.", lower_bound=1)
    app.run(main)
