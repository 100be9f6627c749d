"""Trains one stage.

    python -m experiments.train --gin_file=gin_configs/train/bluelm_v_stage1.gin --workdir=runs/stage1

The work directory receives the resolved config (config.json, config.gin), metrics.jsonl, TensorBoard
events and checkpoints/. Started again, the same command continues from the newest checkpoint with the
same batches. `--dry_run` prints the config, parameter counts, FLOPs and activation bytes of a row, and
batch shapes and the mixture, without training.
"""

from __future__ import annotations

from pathlib import Path

from absl import flags

from bluelm_jax import train as train_lib
from bluelm_jax.data.opening import open_records
from bluelm_jax.run_config import RunConfig
from experiments import cli, run_summary
from gin_configs import binding, command

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.", required=True)
flags.adopt_module_key_flags(command)


def main() -> None:
    """Builds the run from gin and trains it."""
    run = command.build(RunConfig)
    if command.DRY_RUN.value:
        print(run_summary.describe_run(run))
        return
    workdir = Path(WORKDIR.value)
    texts = {"config.gin": binding.resolved()}
    cli.check_same_run(run, workdir)
    records = [open_records(source, run.data.seed) for source in run.data.sources]
    print(run_summary.describe_mixture(run, records))
    with cli.progress_bar(workdir.name, run.train.steps, cli.steps_done(workdir)) as progress:
        finished = train_lib.train(run, workdir, progress, texts, records)
    print(
        f"{finished.steps_now} steps in {finished.seconds:.1f} s; step {finished.step} in {workdir}"
    )
    print(f"data: {finished.data}")


if __name__ == "__main__":
    command.run(main)
