"""Shows what the model is trained on: supervised tokens, image spans, samples in a row, tiles.

    python -m experiments.inspect_data --run=runs/quickstart/relaxed --html=batch.html
    python -m experiments.inspect_data --data_json=data.json --image_root=images --seq_len=2048

Prints batches of a run's data, and writes the last one as an HTML page with its tiles: every token
with its id under the pointer, special tokens framed, padding and the borders between samples drawn.
A run that has not started yet is named by the --gin_file and --gin_bindings that it will be trained
with. Samples at which the run would stop are left out here, and named.

Colours are used where the output is a terminal and NO_COLOR is not set; --color overrides that.
Without colours supervised text stands between « », special tokens between ⟨ ⟩.
"""

from __future__ import annotations

import dataclasses
import shutil
import sys

from absl import flags

from bluelm_jax.data_config import DataConfig
from experiments import data_flags, data_page, data_terminal, data_view
from gin_configs import command

SKIP = flags.DEFINE_integer("skip", 0, "Batches to pass over first.", lower_bound=0)
BATCHES = flags.DEFINE_integer("batches", 1, "Batches to show.", lower_bound=1)
HTML = flags.DEFINE_string("html", None, "File to write the last batch to, as a page.")
COLOR = flags.DEFINE_enum("color", "auto", ["auto", "always", "never"], "Colours.")
WIDTH = flags.DEFINE_integer(
    "width",
    0,
    "Columns; 0: those of the terminal, and no limit where there is none.",
    lower_bound=0,
)
for _module in (command, data_flags):
    flags.adopt_module_key_flags(_module)

_LENGTH, _TILES = 2048, 40  # A batch of --data_json, where no flag says otherwise.


def main() -> None:
    """Shows the data of the run that the flags name."""
    chosen = data_flags.chosen()
    viewer = data_view.Viewer(_bounded(chosen.data), side=chosen.side)
    # In a pipe or file lines stay whole, for grep and editors.
    terminal = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    width = WIDTH.value or terminal
    view = None
    for view in viewer.views(SKIP.value, BATCHES.value):
        print(data_terminal.render(view, color=data_terminal.use_color(COLOR.value), width=width))
    print(viewer.counters)
    if HTML.value is not None and view is not None:
        sources = ", ".join(source.path for source in chosen.data.sources)
        notes = {"Sources": sources, "Template": chosen.data.template, "Counted": viewer.counters}
        data_page.write(HTML.value, view, f"Batch {view.number}", notes)
        print(f"wrote {HTML.value}")


def _bounded(data: DataConfig) -> DataConfig:
    """`data`, with the sizes of a batch where --data_json came without."""
    bounds = {}
    if data.seq_len == data_flags.UNBOUNDED:
        bounds["seq_len"] = _LENGTH
    if data.tiles_per_group == data_flags.UNBOUNDED:
        bounds["tiles_per_group"] = _TILES
    return dataclasses.replace(data, **bounds)


if __name__ == "__main__":
    command.run(main)
