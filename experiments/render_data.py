"""Renders the reading task: LLaVA-format JSON files and PNG images.

    python -m experiments.render_data --out=/tmp/reading --num_train=8000 --num_eval=500

writes `stage1_train.json`, `stage1_eval.json`, `stage2_train.json`, `stage2_eval.json` and the
images they name. The same flags write the same bytes.
"""

import pathlib
import time

from absl import app, flags

from bluelm_jax.data.rendering import reading_pages

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Defines the command's flags; not on import, where they could clash with another command's."""
    flags.DEFINE_string("out", None, "Folder to write to.", required=True)
    flags.DEFINE_integer("seed", 0, "Seed of every page.", lower_bound=0)
    flags.DEFINE_integer("num_train", 8000, "Training pages a kind.", lower_bound=0)
    flags.DEFINE_integer("num_eval", 500, "Held-out pages a kind.", lower_bound=0)
    flags.DEFINE_enum("kind", "both", ["stage1", "stage2", "both"], "Which pages.")
    flags.DEFINE_integer("tile_size", 56, "Tile side in pixels.", lower_bound=16)
    flags.DEFINE_integer("stage1_digits", 8, "Digits a stage-1 page.", lower_bound=1)
    flags.DEFINE_integer("stage2_digits", 12, "Digits a stage-2 page.", lower_bound=1)
    flags.DEFINE_list("stage2_height", ["8", "13"], "Range of stage-2 digit height, canvas pixels.")
    flags.DEFINE_float("receipts_fraction", 0.5, "Share of stage-2 sizes that are receipts'.")
    flags.DEFINE_string("prompt", "Read.", "The question.")
    flags.DEFINE_string("image_sizes", None, "CSV of real image sizes; default: the package's own.")


def configs() -> list[reading_pages.PageConfig]:
    """Returns the pages that the flags ask for."""
    low, high = map(float, FLAGS.stage2_height)
    common = {"tile_size": FLAGS.tile_size, "prompt": FLAGS.prompt}
    both = {
        "stage1": reading_pages.stage1(num_digits=FLAGS.stage1_digits, **common),
        "stage2": reading_pages.stage2(
            num_digits=FLAGS.stage2_digits,
            receipts_fraction=FLAGS.receipts_fraction,
            stage2_height=(low, high),
            **common,
        ),
    }
    return list(both.values()) if FLAGS.kind == "both" else [both[FLAGS.kind]]


def main(argv: list[str]) -> None:
    """Writes the splits and says how fast."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    sizes_path = pathlib.Path(FLAGS.image_sizes) if FLAGS.image_sizes else None
    for cfg in configs():
        for split, count in (("train", FLAGS.num_train), ("eval", FLAGS.num_eval)):
            start = time.perf_counter()
            path = reading_pages.write_split(
                FLAGS.out,
                cfg,
                seed=FLAGS.seed,
                split=split,
                num_pages=count,
                sizes_path=sizes_path,
            )
            seconds = time.perf_counter() - start
            print(f"{path}: {count} pages, {seconds:.1f} s, {count / seconds:.0f} pages/s")


if __name__ == "__main__":
    define_flags()
    app.run(main)
