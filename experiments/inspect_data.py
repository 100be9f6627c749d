"""Shows what the model is trained on: supervised tokens, image spans, samples in a row, tiles.

    python -m experiments.inspect_data --gin_file=gin_configs/quickstart.gin --html=batch.html

Prints batches of the configured run, supervised tokens in green (between « » without colours), and
writes the last one as an HTML page with its tiles.
"""

from __future__ import annotations

import sys

from absl import flags

from experiments import cli, data_view, gin_setup

SKIP = flags.DEFINE_integer("skip", 0, "Batches to pass over first.", lower_bound=0)
BATCHES = flags.DEFINE_integer("batches", 1, "Batches to show.", lower_bound=1)
HTML = flags.DEFINE_string("html", None, "File to write the last batch to, as a page.")


def main(_: list[str]) -> None:
    """Builds the run from gin and shows its data."""
    run = cli.build(gin_setup.run)
    color = sys.stdout.isatty()
    options = {"skip": SKIP.value, "batches": BATCHES.value, "html_path": HTML.value}
    print(data_view.show(run.data, side=run.token_side, color=color, **options))


if __name__ == "__main__":
    cli.run(main)
