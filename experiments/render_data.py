"""Renders training data: LLaVA-format JSON files and the images they name.

    python -m experiments.render_data --out=/tmp/reading --num_train=8000 --num_eval=500
    python -m experiments.render_data --kind=text --count=10000 --workers=4 --out=/tmp/rendered
    python -m experiments.render_data --kind=pdf --input=/tmp/pdfs --out=/tmp/rendered

--kind chooses what is drawn:

    both, stage1, stage2   the reading task of the quickstart (digits); `pages` is `both`
    text                   sentences in any installed font; --input: UTF-8 text, Markdown or JSONL
    formulas               formulas and their LaTeX; --input: lists, one formula a line
    markdown               tables and pages and their Markdown; --input: Markdown or JSONL
    pdf                    pages and their text; --input: PDF files or folders of them

The same flags and input write the same bytes, with any number of --workers. An interrupted
rendering goes on where it was when the same command is given again (text, formulas, markdown, pdf).
docs/rendering.md says what the files hold and under which terms fonts may be used.
"""

import pathlib
import sys
import time
from concurrent.futures import process

import tqdm
from absl import app, flags

from bluelm_jax.data.rendering import contact_sheet, jobs, reading_pages, shards

FLAGS = flags.FLAGS
READING = ("both", "pages", "stage1", "stage2")


def define_flags() -> None:
    """Defines the command's flags; not on import, where they could clash with another command's."""
    flags.DEFINE_string("out", None, "Folder to write to.", required=True)
    flags.DEFINE_integer("seed", 0, "Seed of every image.", lower_bound=0)
    flags.DEFINE_enum("kind", "both", [*READING, *shards.KINDS], "What is drawn, see above.")
    _define_reading_flags()
    flags.DEFINE_integer(
        "count", None, "Images; pdf: every page once by default, else 1000.", lower_bound=1
    )
    flags.DEFINE_integer("workers", 1, "Processes.", lower_bound=1)
    flags.DEFINE_list("input", [], "Files and folders to take texts from; own texts by default.")
    flags.DEFINE_string("language", "", "Language of the input, e.g. de; guessed by default.")
    flags.DEFINE_list("fonts", [], "Folders of fonts; the system's and Matplotlib's by default.")
    flags.DEFINE_string("families", "", "Regular expression that font families must match.")
    flags.DEFINE_list("sizes", [], "Range of the font size in pixels; pdf: of the resolution.")
    flags.DEFINE_integer("max_side", 1536, "Longest side of an image in pixels.", lower_bound=128)
    flags.DEFINE_float("noise", 1.0, "How much is done to the images, 0..1.", 0.0, 1.0)
    flags.DEFINE_string(
        "contact_sheet", None, "Also write one image of the first ones of each kind in --out, here."
    )
    flags.DEFINE_integer("contact_images", 40, "Images on the contact sheet.", lower_bound=1)


def _define_reading_flags() -> None:
    flags.DEFINE_integer("num_train", 8000, "Reading task: training pages a kind.", lower_bound=0)
    flags.DEFINE_integer("num_eval", 500, "Reading task: held-out pages a kind.", lower_bound=0)
    flags.DEFINE_integer("tile_size", 56, "Reading task: tile side in pixels.", lower_bound=16)
    flags.DEFINE_integer("stage1_digits", 8, "Digits a stage-1 page.", lower_bound=1)
    flags.DEFINE_integer("stage2_digits", 12, "Digits a stage-2 page.", lower_bound=1)
    flags.DEFINE_list("stage2_height", ["8", "13"], "Range of stage-2 digit height, canvas pixels.")
    flags.DEFINE_float("receipts_fraction", 0.5, "Share of stage-2 sizes that are receipts'.")
    flags.DEFINE_string("prompt", "Read.", "Reading task: the question.")
    flags.DEFINE_string("image_sizes", None, "CSV of real image sizes; default: the package's own.")


# Flags that mean something for one half of the kinds only.
_READING_ONLY = (
    "num_train", "num_eval", "tile_size", "stage1_digits", "stage2_digits", "stage2_height",
    "receipts_fraction", "prompt", "image_sizes",
)  # fmt: skip
_OTHERS_ONLY = (
    "workers", "input", "language", "fonts", "families", "sizes", "max_side", "noise",
)  # fmt: skip


def configs() -> list[reading_pages.PageConfig]:
    """Returns the pages of the reading task that the flags ask for."""
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
    return list(both.values()) if FLAGS.kind in ("both", "pages") else [both[FLAGS.kind]]


def write_reading_pages() -> list[pathlib.Path]:
    """Writes the splits of the reading task and says how fast; returns the JSON files."""
    sizes_path = pathlib.Path(FLAGS.image_sizes) if FLAGS.image_sizes else None
    num_train = FLAGS.num_train if FLAGS.count is None else FLAGS.count
    written = []
    for cfg in configs():
        for split, count in (("train", num_train), ("eval", FLAGS.num_eval)):
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
            written.append(path)
    return written


def write_rendered() -> list[pathlib.Path]:
    """Writes text, formulas, Markdown or PDF pages; returns the JSON files of all kinds in --out."""
    task = jobs.make_task(
        FLAGS.kind,
        seed=FLAGS.seed,
        inputs=FLAGS.input,
        language=FLAGS.language,
        folders=FLAGS.fonts,
        families=FLAGS.families,
        sizes=_sizes(),
        max_side=FLAGS.max_side,
        noise=FLAGS.noise,
    )
    count = FLAGS.count or jobs.default_count(task)
    start = time.perf_counter()
    with tqdm.tqdm(total=count, desc=FLAGS.kind, unit="image", disable=None) as bar:
        steps = []  # samples done, the first those of an earlier start

        def progress(done: int) -> None:
            steps.append(done)
            bar.update(done - bar.n)

        result = shards.render(
            task, FLAGS.out, seed=FLAGS.seed, count=count, workers=FLAGS.workers, progress=progress
        )
    seconds, before = time.perf_counter() - start, steps[0]
    path = pathlib.Path(FLAGS.out) / f"{FLAGS.kind}.json"
    print(
        f"{path}: {result['written']} of {count} samples, {before} of them drawn before; ", end=""
    )
    rate = (count - before) / seconds
    print(f"{seconds:.1f} s, {rate:.0f} images/s with {FLAGS.workers} workers")
    print(f"languages: {_counts(result['languages'])}; {len(result['fonts'])} faces used")
    for reason, entry in result["left_out"].items():
        print(f"left out: {entry['count']} x {reason}, e.g. {'; '.join(entry['names'][:3])}")
    return [file for kind in shards.KINDS if (file := path.with_name(f"{kind}.json")).is_file()]


def _sizes() -> tuple[int, int] | None:
    if not FLAGS.sizes:
        return None
    try:
        low, high = map(int, FLAGS.sizes)
    except ValueError as error:
        raise ValueError(f"--sizes={','.join(FLAGS.sizes)}: two whole numbers, low,high") from error
    return low, high


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"


def _check_flags() -> None:
    useless = _OTHERS_ONLY if FLAGS.kind in READING else _READING_ONLY
    given = [f"--{name}" for name in useless if FLAGS[name].present]
    if given:
        raise ValueError(f"--kind={FLAGS.kind} has no use for {', '.join(given)}")
    if FLAGS.kind in READING and FLAGS["count"].present and FLAGS["num_train"].present:
        raise ValueError("--count and --num_train are the same for the reading task: give one")


def main(argv: list[str]) -> None:
    """Writes what the flags ask for; problems with them end in one line."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments {argv[1:]}")
    try:
        _check_flags()
        reading = FLAGS.kind in READING
        paths = write_reading_pages() if reading else write_rendered()
        if FLAGS.contact_sheet:
            contact_sheet.write(FLAGS.contact_sheet, paths, FLAGS.contact_images)
            print(f"{FLAGS.contact_sheet}: a look at {', '.join(path.name for path in paths)}")
    except KeyboardInterrupt:
        goes_on = FLAGS.kind not in READING
        print("stopped" + "; the same command goes on from here" * goes_on, file=sys.stderr)
        sys.exit(130)
    except process.BrokenProcessPool:
        print(
            "render_data: a worker process died, perhaps for lack of memory; the same command goes "
            "on from here, --workers=1 needs least",
            file=sys.stderr,
        )
        sys.exit(1)
    except (ValueError, ImportError, OSError) as error:
        print(f"render_data: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    define_flags()
    app.run(main)
