"""Checks every record of a data set and names the bad ones, before a run finds them.

    python -m experiments.validate_data --run=runs/quickstart/relaxed --decode
    python -m experiments.validate_data --gin_file=my.gin --report=check.json --workers=8
    python -m experiments.validate_data --data_json=data.json --image_root=images --seq_len=4096

Prints a table of the kinds of defect with the first samples of each. --report writes a summary as
JSON, and beside it every finding as a line of JSON (check.findings.jsonl for check.json). Without
--decode the headers of images are read alone, which finds all but damaged pixels and equal images.
--list_kinds prints what can be found.

Exit status: 0 nothing of the severity of --fail_on (default: error) or worse was found; 1 something
was; 2 the command itself was wrong; 130 Ctrl-C, with what was known until then written as partial.
"""

from __future__ import annotations

import contextlib
import sys

import tqdm
from absl import flags

from bluelm_jax.data import findings, validation
from bluelm_jax.interrupt import DeferredInterrupt
from experiments import data_flags, validation_report
from gin_configs import command

DECODE = flags.DEFINE_bool("decode", False, "Decode every image.")
LIMIT = flags.DEFINE_integer("limit", 0, "Records of each file to check; 0: all.", lower_bound=0)
NAMES = flags.DEFINE_integer("names", 5, "Samples of each kind in the table.", lower_bound=0)
MIN_SIDE = flags.DEFINE_integer("min_side", 16, "Warn of images with a shorter side below.")
WORKERS = flags.DEFINE_integer("workers", 0, "Processes; 0: this one.", lower_bound=0)
REPORT = flags.DEFINE_string("report", None, "JSON file to write; findings go beside it.")
FAIL_ON = flags.DEFINE_enum(
    "fail_on", "error", findings.SEVERITIES, "Least severity that makes the exit status 1."
)
LIST_KINDS = flags.DEFINE_bool("list_kinds", False, "Print what can be found, and stop.")
for _module in (command, data_flags):
    flags.adopt_module_key_flags(_module)


def main() -> None:
    """Checks the data that the flags name."""
    if LIST_KINDS.value:
        print("\n".join(validation_report.kind_lines()))
        return
    chosen = data_flags.chosen()
    if REPORT.value is not None:
        inputs = [source.path for source in chosen.data.sources]
        inputs += filter(None, [getattr(chosen.data.tokenizer, "path", None)])
        inputs += command.GIN_FILE.value or []
        validation_report.check_target(REPORT.value, inputs)
    options = validation.Options(
        decode=DECODE.value,
        limit=LIMIT.value,
        workers=WORKERS.value,
        min_side=MIN_SIDE.value,
        max_examples=NAMES.value,
    )
    with (
        DeferredInterrupt() as interrupt,
        validation_report.finding_writer(REPORT.value) as on_finding,
        contextlib.closing(tqdm.tqdm(unit=" records", disable=None)) as bar,
    ):

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        report = validation.validate(
            chosen.data,
            side=chosen.side,
            options=options,
            on_finding=on_finding,
            on_progress=on_progress,
            should_stop=lambda: interrupt.seen,
        )
    print("\n".join(validation_report.lines(report)))
    if REPORT.value is not None:
        validation_report.write(REPORT.value, report, options)
    if report.partial:
        sys.exit(130)
    sys.exit(1 if report.count(FAIL_ON.value) else 0)


if __name__ == "__main__":
    command.run(main)
