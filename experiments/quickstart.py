r"""The paper's question on a small real model, and a TFLite model of the answer.

    make quickstart        # or: python -m experiments.quickstart --workdir=runs/quickstart

1. renders pages of digits whose sizes are those of real photographs and receipts;
2. stage 1: warms the model up on single tiles;
3. stage 2: trains it under each tiling scheme from that same checkpoint, same steps, seed and order;
4. reads held-out pages, compares accuracy with the number of image tokens;
5. exports the relaxed scheme's model to TFLite, float and quantised, and runs both on LiteRT;
6. writes report.html, report.md, results.json and plots into the work directory.

Stopped at any point, the same command continues. Your own data instead of the pages:

    python -m experiments.quickstart --workdir=runs/mine \
        --gin_bindings="Quickstart.train_json = 'train.json'" \
        --gin_bindings="Quickstart.eval_json = 'eval.json'" \
        --gin_bindings="Quickstart.image_root = 'images'"
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from absl import flags

from bluelm_jax.files import write_text
from experiments import ablation, cli, gin_setup, report, summarise
from experiments import quickstart_steps as steps
from experiments import results as results_lib
from experiments.quickstart_config import Quickstart
from experiments.results import Results
from gin_configs import command

WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Directory of everything it makes.")
EXPORT = flags.DEFINE_bool("export", True, "Export to TFLite and compare on LiteRT.")
flags.adopt_module_key_flags(command)


def run_job(job: Quickstart, workdir: Path, export: bool) -> Results:
    """Everything, from pages to report; returns the results.

    A finished job is not touched again: its results still say what code and machine made them.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    done, stamp = workdir / "results.json", workdir / "job.json"
    text = steps.job_text(job, export)
    if done.is_file() and stamp.is_file() and stamp.read_text() == text:
        print("this job is finished; its report is as it was", file=sys.stderr)
        return results_lib.load(done)
    phases = steps.Phases(workdir / "phases.json")
    sources = phases.run("data", lambda: steps.make_sources(job, workdir))
    stage1, first = workdir / "stage1", steps.stage1_run(job, sources.stage1)
    plan = steps.stage2_ablation(job, sources, stage1)
    ablation.check_held_out(plan)
    phases.run("stage 1", lambda: ablation.train_or_resume(first, stage1))
    schemes_read, samples = phases.run(
        "stage 2 and reading", lambda: ablation.run_ablation(plan, workdir)
    )
    exported, note = None, "the export was switched off with --noexport"
    if export:
        note = ""
        exported = phases.run("export", lambda: steps.export_and_compare(job, plan, workdir))
    results = summarise.build_results(
        steps.run_info(job, phases), schemes_read,
        references=[r.reference for r in samples], buckets=[r.bucket for r in samples],
        images=[r.image or "" for r in samples], subject=job.subject, export=exported,
        export_note=note,
    )  # fmt: skip
    report.write_report(results, workdir, image_root=".")
    write_text(stamp, text)
    return results


def main() -> None:
    """Builds the job from gin, runs it, prints the table."""
    job = command.build(Quickstart, "gin_configs/quickstart.gin")
    if command.DRY_RUN.value:
        print(gin_setup.describe(job))
        print(cli.model_summary(job.model))
        return
    workdir = Path(WORKDIR.value)
    start = time.monotonic()
    results = run_job(job, workdir, EXPORT.value)
    print(report.table_text(results))
    print(f"report: {workdir}/report.html   ({time.monotonic() - start:.0f} s in this start)")


if __name__ == "__main__":
    command.run(main)
