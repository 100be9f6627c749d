r"""Reads held-out images with a trained model and scores the answers.

    python -m experiments.evaluate --run=runs/quickstart/relaxed \
        --data_json=runs/quickstart/data/stage2_eval.json --image_root=runs/quickstart/data \
        --out=readings.json --max_new_tokens=12

Prints exact match and character accuracy; writes one reading a sample, and the settings behind them.
Answers are greedy and at most 32 tokens long; every field of EvalConfig and SamplingConfig is a gin
binding. The run's own policies (DataConfig.on_...) say what becomes of bad samples, and --leave_out
leaves them out whatever they say; both outputs count what was left out.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from absl import flags

from bluelm_jax import run_folder, serialize
from bluelm_jax.data.counters import Counters
from bluelm_jax.data.sample_checks import lenient
from bluelm_jax.data_config import SourceConfig
from experiments import cli, eval_settings, evaluation, gin_setup
from gin_configs import command

RUN = flags.DEFINE_string("run", None, "Directory of the trained run.", required=True)
flags.DEFINE_alias("workdir", "run")
DATA_JSON = flags.DEFINE_string("data_json", None, "LLaVA JSON of held-out samples.", required=True)
IMAGE_ROOT = flags.DEFINE_string("image_root", "", "Folder that image paths start from.")
OUT = flags.DEFINE_string("out", None, "JSON file for the readings (default: only print).")
MAX_NEW = flags.DEFINE_integer("max_new_tokens", None, "SamplingConfig.max_new_tokens.")
LIMIT = flags.DEFINE_integer("limit", None, "EvalConfig.limit; 0 reads all.")
LEAVE_OUT = flags.DEFINE_bool("leave_out", False, "Leave out bad samples and count them.")
flags.adopt_module_key_flags(command)


def main() -> None:
    """Evaluates a run's newest checkpoint."""
    cfg = eval_settings.eval_config(MAX_NEW.value, LIMIT.value)
    run = serialize.load_run_config(RUN.value)
    if LEAVE_OUT.value:
        run = dataclasses.replace(run, data=lenient(run.data))
    source = SourceConfig(path=DATA_JSON.value, image_root=IMAGE_ROOT.value)
    if command.DRY_RUN.value:
        print(gin_setup.describe(cfg))
        print(cli.model_summary(run.model))
        return
    weights = run_folder.load_weights(RUN.value, run.model)
    with cli.progress_bar("evaluate", evaluation.num_samples(source, cfg)) as update:
        counters = Counters(run.data.max_names)
        readings = evaluation.evaluate(weights, run, source, cfg, update, counters)
    result = {**evaluation.scores(readings), "left_out": evaluation.left_out(counters)}
    for name, value in (result | counters.counts).items():
        print(f"{name:<20} {value:.4g}")
    if OUT.value:
        settings = {"run": RUN.value, "data": DATA_JSON.value, "template": run.data.template,
                    "sampling": dataclasses.asdict(cfg.sampling)}  # fmt: skip
        rows = [dataclasses.asdict(r) for r in readings]
        found = {"settings": settings, "scores": result, "counted": counters.state()}
        Path(OUT.value).write_text(json.dumps({**found, "readings": rows}, indent=1) + "\n")


if __name__ == "__main__":
    command.run(main)
