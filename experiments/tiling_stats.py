r"""What each tiling scheme does to a dataset, from image headers alone.

    python -m experiments.tiling_stats --sizes=bluelm_jax/data/assets/image_sizes.csv
    python -m experiments.tiling_stats --folder=photos --out=runs/tiling
    python -m experiments.tiling_stats --data_json=llava_v1_5_mix665k.json --image_root=images \
        --out=runs/tiling_665k
    python -m experiments.tiling_stats --sizes=sizes.csv --per_image=decisions.csv
    python -m experiments.tiling_stats --visualize=out 394x390 380x76 photo.jpg

Prints, for each scheme: grids, views and tokens an image, how much larger the canvas is than the
image, and the share of it that is padding; and for each pair of schemes, how often the first
takes a smaller, equal or larger canvas (as BlueLM-V-3B counts in sec. 5.1). With --out the same
as table.txt, stats.json and plots, with the files that could not be read in unreadable.csv.
"""

from __future__ import annotations

import csv
import json
import os
import pathlib
import time
from typing import Any

from absl import app, flags, logging

from bluelm_jax.layout import Plain, SliceTags, UnpadNewline
from bluelm_jax.schemes import PRESETS, Layout
from experiments import tiling_per_image, tiling_report, tiling_sources
from experiments.tiling_sources import Sizes
from gin_configs.errors import guarded

DEFAULT_SCHEMES = ("relaxed_384_3x3_a0.1", "llava_next_384_3x3", "internvl_384_max9")
LAYOUTS: dict[str, Layout] = {
    "plain": Plain(),
    "unpad_newline": UnpadNewline(),
    "unpad_newline_max9": UnpadNewline(anyres_max=9),
    "slice_tags": SliceTags(),
}

FLAGS = flags.FLAGS
flags.DEFINE_string("sizes", None, "CSV file with columns width, height and perhaps source.")
flags.DEFINE_string("data_json", None, "LLaVA dataset, JSON or JSON lines; needs --image_root.")
flags.DEFINE_string("image_root", None, "Folder that the images of --data_json are relative to.")
flags.DEFINE_string("folder", None, "Folder of image files, searched recursively.")
flags.DEFINE_list("schemes", list(DEFAULT_SCHEMES), f"Presets, of: {', '.join(PRESETS)}.")
flags.DEFINE_enum("layout", "plain", list(LAYOUTS), "Layout in which tokens are counted.")
flags.DEFINE_integer("patch_size", 14, "Patch side in pixels, for token counts.", lower_bound=1)
flags.DEFINE_integer("downsample", 2, "Token downsampling a side, for counts.", lower_bound=1)
flags.DEFINE_integer("workers", None, "Processes that read headers; default: one a core.")
flags.DEFINE_string("out", None, "Folder for table.txt, stats.json, plots and unreadable.csv.")
flags.DEFINE_string("per_image", None, "CSV file to write: every preset's decision for each size.")
flags.DEFINE_string("visualize", None, "Folder for pictures of the images named as arguments.")


def _write_report(out: str, report: dict[str, Any], table: str) -> None:
    from experiments import tiling_plots  # loads Matplotlib, which the table alone does not need

    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.txt").write_text(table, encoding="utf-8")
    (folder / "stats.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    with open(folder / "unreadable.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["file", "reason"])
        writer.writerows((bad["file"], bad["reason"]) for bad in report["unreadable"])
    written = tiling_plots.write(folder, report)
    print(f"wrote table.txt, stats.json, unreadable.csv, {', '.join(written)} in {folder}")


def _load() -> Sizes | None:
    workers = FLAGS.workers if FLAGS.workers is not None else os.cpu_count() or 1
    given = [name for name in ("sizes", "folder", "data_json") if FLAGS[name].value]
    if not given and FLAGS.visualize:
        return None
    if len(given) != 1:
        raise ValueError(f"give one of --sizes, --folder and --data_json, not {given or 'none'}")
    if FLAGS.sizes:
        return tiling_sources.from_csv(FLAGS.sizes)
    if FLAGS.folder:
        return tiling_sources.from_folder(FLAGS.folder, workers)
    if not FLAGS.image_root:
        raise ValueError("--data_json needs --image_root")
    return tiling_sources.from_llava(FLAGS.data_json, FLAGS.image_root, workers)


def main(argv: list[str]) -> None:
    """Runs the command."""
    unknown = [name for name in FLAGS.schemes if name not in PRESETS]
    if unknown:
        raise ValueError(f"--schemes: {unknown} not among {', '.join(PRESETS)}")
    if argv[1:] and not FLAGS.visualize:
        raise ValueError(f"arguments {argv[1:]} are for --visualize")
    tilings = {name: PRESETS[name] for name in FLAGS.schemes}
    layout = LAYOUTS[FLAGS.layout]
    if FLAGS.visualize:
        from experiments import tiling_figure

        if not argv[1:]:
            raise ValueError("--visualize: name image files, or sizes such as 394x390")
        for path in tiling_figure.write(
            FLAGS.visualize, argv[1:], tilings, layout, FLAGS.patch_size, FLAGS.downsample
        ):
            print(f"wrote {path}")
    start = time.perf_counter()
    sizes = _load()
    if sizes is None:
        return
    logging.info("%d sizes in %.2f s", len(sizes), time.perf_counter() - start)
    if FLAGS.per_image:
        tiling_per_image.write(FLAGS.per_image, sizes)
        print(f"wrote {len(sizes):,} rows to {FLAGS.per_image}")
        return
    report = tiling_report.summarise(sizes, tilings, layout, FLAGS.patch_size, FLAGS.downsample)
    table = tiling_report.format_table(report)
    print(table, end="")
    if FLAGS.out:
        _write_report(FLAGS.out, report, table)


if __name__ == "__main__":
    logging.set_verbosity(logging.WARNING)
    app.run(guarded(main))
