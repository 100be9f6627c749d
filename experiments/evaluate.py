r"""Reads held-out images with a trained model and scores the answers.

    python -m experiments.evaluate --run=runs/quickstart/relaxed \
        --data_json=runs/quickstart/data/stage2_eval.json --image_root=runs/quickstart/data \
        --out=readings.json

Prints exact match and character accuracy; writes one reading a sample, and the settings behind them.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from absl import flags

from bluelm_jax import run_folder, serialize
from bluelm_jax.data_config import SourceConfig
from experiments import cli, evaluation, gin_setup
from gin_configs import command

RUN = flags.DEFINE_string("run", None, "Directory of the trained run.", required=True)
flags.DEFINE_alias("workdir", "run")
DATA_JSON = flags.DEFINE_string("data_json", None, "LLaVA JSON of held-out samples.", required=True)
IMAGE_ROOT = flags.DEFINE_string("image_root", "", "Folder that image paths start from.")
OUT = flags.DEFINE_string("out", None, "JSON file for the readings (default: only print).")
flags.adopt_module_key_flags(command)


def main() -> None:
    """Evaluates a run's newest checkpoint."""
    cfg = command.build(evaluation.EvalConfig)
    run = serialize.load_run_config(RUN.value)
    source = SourceConfig(path=DATA_JSON.value, image_root=IMAGE_ROOT.value)
    if command.DRY_RUN.value:
        print(gin_setup.describe(cfg))
        print(cli.model_summary(run.model))
        return
    weights = run_folder.load_weights(RUN.value, run.model)
    with cli.progress_bar("evaluate", evaluation.num_samples(source, cfg)) as update:
        readings = evaluation.evaluate(weights, run, source, cfg, update)
    result = evaluation.scores(readings)
    for name, value in result.items():
        print(f"{name:<20} {value:.4g}")
    if OUT.value:
        settings = {"run": RUN.value, "data": DATA_JSON.value, "template": run.data.template,
                    "sampling": dataclasses.asdict(cfg.sampling)}  # fmt: skip
        rows = [dataclasses.asdict(r) for r in readings]
        text = json.dumps({"settings": settings, "scores": result, "readings": rows}, indent=1)
        Path(OUT.value).write_text(text + "\n")


if __name__ == "__main__":
    command.run(main)
