"""Shows what the model is trained on: supervised tokens, image spans, samples in a row, tiles.

    python -m experiments.inspect_data --run=runs/quickstart/relaxed --html=batch.html

Prints batches of a run's data, supervised tokens in green (between « » without colours), and writes
the last one as an HTML page with its tiles. A run that has not started yet is named by the
--gin_file and --gin_bindings that it will be trained with.
"""

from __future__ import annotations

import sys

from absl import flags

from experiments import data_view
from gin_configs import command

RUN = flags.DEFINE_string("run", None, "Directory of a run.")
SKIP = flags.DEFINE_integer("skip", 0, "Batches to pass over first.", lower_bound=0)
BATCHES = flags.DEFINE_integer("batches", 1, "Batches to show.", lower_bound=1)
HTML = flags.DEFINE_string("html", None, "File to write the last batch to, as a page.")
flags.adopt_module_key_flags(command)


def main() -> None:
    """Shows the data of the run that the flags name."""
    run = data_view.configured_run(RUN.value)
    color = sys.stdout.isatty()
    options = {"skip": SKIP.value, "batches": BATCHES.value, "html_path": HTML.value}
    print(data_view.show(run.data, side=run.token_side, color=color, **options))


if __name__ == "__main__":
    command.run(main)
