"""Checks every record of a run's data and names the bad ones; exit status 1 if there are any.

    python -m experiments.validate_data --run=runs/quickstart/relaxed --decode

A run that has not started yet is named by the --gin_file and --gin_bindings that it will be trained
with. Without --decode only the headers of images are read, which finds all but damaged pixels.
"""

from __future__ import annotations

import dataclasses
import sys

from absl import flags

from bluelm_jax.data import validation
from experiments import data_view
from gin_configs import command

RUN = flags.DEFINE_string("run", None, "Directory of a run.")
DECODE = flags.DEFINE_bool("decode", False, "Decode every image.")
LIMIT = flags.DEFINE_integer("limit", 0, "Records of each file to check; 0: all.", lower_bound=0)
NAMES = flags.DEFINE_integer("names", 20, "Samples to name for each problem.", lower_bound=0)
flags.adopt_module_key_flags(command)


def main() -> None:
    """Checks the data of the run that the flags name."""
    run = data_view.configured_run(RUN.value)
    data = dataclasses.replace(run.data, max_names=NAMES.value)
    reports = validation.validate(data, side=run.token_side, decode=DECODE.value, limit=LIMIT.value)
    for report in reports:
        print("\n".join(report.lines()))
    problems = sum(report.problems for report in reports)
    print(f"{problems} problems")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    command.run(main)
