"""Trains one stage.

    python -m experiments.train --gin_file=gin_configs/train/bluelm_v_stage1.gin --workdir=runs/stage1

The work directory receives the resolved config (config.json, config.gin), metrics.jsonl, TensorBoard
events and checkpoints/. Started again, the same command continues from the newest checkpoint with the
same batches. `--dry_run` prints the config, parameter counts, FLOPs and activation bytes of a row, and
batch shapes and the mixture, without training.
"""

from __future__ import annotations

from pathlib import Path

import jax
from absl import flags

from bluelm_jax import layout
from bluelm_jax import train as train_lib
from bluelm_jax.data import mixture
from bluelm_jax.run_config import RunConfig
from experiments import cli, gin_setup
from gin_configs import binding, command

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)
flags.adopt_module_key_flags(command)


def describe_run(run: RunConfig) -> str:
    """What --dry_run prints: config, parameters, batch shapes, bytes."""
    data = run.data
    size = run.model.vision.tile_size
    pixels = data.tile_groups * data.tiles_per_group * size * size * 3
    queries = data.tile_groups * data.tiles_per_group * layout.tokens_per_view(run.token_side)
    return "\n".join(
        [
            gin_setup.describe(run),
            "",
            cli.model_summary(run.model),
            cli.cost_summary(run),
            f"trained: {', '.join(run.train.trainable)}",
            f"batch on this host: tokens [{data.batch_size}, {data.seq_len}], tiles "
            f"[{data.tile_groups}, {data.tiles_per_group}, {size}, {size}, 3] "
            f"({pixels / 2**20:.1f} MiB, {queries:,} image tokens)",
            f"steps: {run.train.steps:,} of {data.batch_size * jax.process_count():,} rows "
            f"in {run.train.accumulation} micro-batches",
            describe_mixture(run),
        ]
    )


def describe_mixture(run: RunConfig) -> str:
    """The sources' sizes, shares and epochs; opens their files where they are there."""
    return mixture.table(run.data, run.train.steps, run.data.batch_size * jax.process_count())


def main() -> None:
    """Builds the run from gin and trains it."""
    run = command.build(RunConfig)
    if command.DRY_RUN.value:
        print(describe_run(run))
        return
    workdir = Path(WORKDIR.value)
    texts = {"config.gin": binding.resolved()}
    cli.check_same_run(run, workdir)
    print(describe_mixture(run))
    with cli.progress_bar(workdir.name, run.train.steps, cli.steps_done(workdir)) as progress:
        finished = train_lib.train(run, workdir, progress, texts)
    print(
        f"{finished.steps_now} steps in {finished.seconds:.1f} s; step {finished.step} in {workdir}"
    )
    print(f"data: {finished.data}")


if __name__ == "__main__":
    command.run(main)
