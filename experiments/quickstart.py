"""The paper's question on a small real model, and a TFLite model of the answer.

    make quickstart        # or: python -m experiments.quickstart --workdir=runs/quickstart

1. renders pages of digits whose sizes are those of real photographs and receipts;
2. stage 1: warms the model up on single tiles;
3. stage 2: trains it under each tiling scheme from that same checkpoint, same steps, seed and order;
4. reads held-out pages, compares accuracy with the number of image tokens;
5. exports the relaxed scheme's model to TFLite, float and quantised, and runs both on LiteRT;
6. writes report.html, report.md, results.json and plots into the work directory.

Stopped at any point, the same command continues. Your own data instead of the pages:

    python -m experiments.quickstart --workdir=runs/mine \
        --gin_bindings="quickstart.train_json = 'train.json'" \
        --gin_bindings="quickstart.eval_json = 'eval.json'" \
        --gin_bindings="quickstart.image_root = 'images'"
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import gin
import jax
import numpy as np
from absl import flags

from bluelm_jax import config, data_config, generate, schemes, serialize
from bluelm_jax.data.rendering import reading_pages
from bluelm_jax.data_config import SourceConfig
from bluelm_jax.run_config import RunConfig
from experiments import ablation, cli, evaluation, gin_setup, report, summarise
from experiments.ablation import Ablation, Variant
from experiments.evaluation import EvalConfig

WORKDIR = flags.DEFINE_string("workdir", "runs/quickstart", "Directory of everything it makes.")
EXPORT = flags.DEFINE_bool("export", True, "Export to TFLite and compare on LiteRT.")

gin_setup.configurable_class(reading_pages.PageConfig)


@gin_setup.configurable_class
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pages:
    """The rendered task: what the pages look like and how many there are."""

    stage1: reading_pages.PageConfig
    stage2: reading_pages.PageConfig
    stage1_count: int
    stage2_count: int
    eval_count: int
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quickstart:
    """The whole job; built by `quickstart` from gin."""

    model: config.VLMConfig
    stage1_data: data_config.DataConfig
    stage2_data: data_config.DataConfig
    stage1: config.TrainConfig
    stage2: config.TrainConfig
    variants: tuple[Variant, ...]
    evaluation: EvalConfig
    pages: Pages
    seeds: tuple[int, ...]
    subject: str
    export_count: int
    export_gin: str
    train_json: str | None
    eval_json: str | None
    image_root: str


@gin.configurable
def quickstart(
    model: config.VLMConfig = gin.REQUIRED,
    stage1_data: data_config.DataConfig = gin.REQUIRED,
    stage2_data: data_config.DataConfig = gin.REQUIRED,
    stage1: config.TrainConfig = gin.REQUIRED,
    stage2: config.TrainConfig = gin.REQUIRED,
    variants: tuple[Variant, ...] = gin.REQUIRED,
    evaluation: EvalConfig = gin.REQUIRED,
    pages: Pages = gin.REQUIRED,
    seeds: tuple[int, ...] = (0,),
    subject: str = "relaxed",
    export_count: int = 100,
    export_gin: str = "gin_configs/export/quickstart.gin",
    train_json: str | None = None,
    eval_json: str | None = None,
    image_root: str = "",
) -> Quickstart:
    """Root: model, two stages, variants, data; `train_json` takes the pages' place."""
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in locals().items()}
    return Quickstart(**values)


# The job -----------------------------------------------------------------------------------------


class Phases:
    """Wall time of each part, kept in a file so that a resumed job reports all its time."""

    def __init__(self, path: Path):
        self._path = path
        self.seconds: dict[str, float] = json.loads(path.read_text()) if path.is_file() else {}

    def run(self, name: str, work):
        """Calls `work()` and adds its seconds to phase `name`."""
        start = time.monotonic()
        try:
            return work()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
            self._path.write_text(json.dumps(self.seconds, indent=1) + "\n")


@dataclasses.dataclass(frozen=True)
class Sources:
    """The JSON files of the job and their image root."""

    stage1: SourceConfig
    train: SourceConfig
    evaluation: SourceConfig


def make_sources(job: Quickstart, workdir: Path) -> Sources:
    """The user's files, or pages rendered into `workdir`/data unless they are there.

    Raises:
      ValueError: only one of train_json and eval_json is given.
    """
    if (job.train_json is None) != (job.eval_json is None):
        raise ValueError("give both quickstart.train_json and quickstart.eval_json, or neither")
    if job.train_json and job.eval_json:
        train = SourceConfig(path=job.train_json, image_root=job.image_root)
        held_out = SourceConfig(path=job.eval_json, image_root=job.image_root)
        return Sources(train, train, held_out)
    data, pages = workdir / "data", job.pages
    wanted = [
        ("stage1_train", pages.stage1, "train", pages.stage1_count),
        ("stage2_train", pages.stage2, "train", pages.stage2_count),
        ("stage2_eval", pages.stage2, "eval", pages.eval_count),
    ]
    stamp, text = data / "pages.json", serialize_pages(pages)
    if not (stamp.is_file() and stamp.read_text() == text):
        for name, look, split, count in wanted:
            print(f"rendering {count:,} pages: {name}", file=sys.stderr)
            reading_pages.write_split(data, look, seed=pages.seed, split=split, num_pages=count)
        stamp.write_text(text)
    return Sources(
        *(SourceConfig(path=str(data / f"{n}.json"), image_root=str(data)) for n, *_ in wanted)
    )


def serialize_pages(pages: Pages) -> str:
    """Tells whether rendered pages are the ones wanted."""
    return json.dumps(dataclasses.asdict(pages), indent=1) + "\n"


def stage1_run(job: Quickstart, source: SourceConfig) -> RunConfig:
    """The warm-up: one view an image."""
    data = dataclasses.replace(job.stage1_data, sources=(source,))
    return ablation.fit_room(RunConfig(model=job.model, data=data, train=job.stage1))


def stage2_ablation(job: Quickstart, sources: Sources, stage1: Path) -> Ablation:
    """The comparison, every arm from the warm-up's weights."""
    data = dataclasses.replace(job.stage2_data, sources=(sources.train,))
    train = dataclasses.replace(job.stage2, init_from=str(stage1 / "checkpoints"))
    return Ablation(
        base=RunConfig(model=job.model, data=data, train=train), variants=job.variants,
        evaluation=job.evaluation, eval_source=sources.evaluation, subject=job.subject,
        seeds=job.seeds,
    )  # fmt: skip


def export_and_compare(job: Quickstart, plan: Ablation, workdir: Path) -> dict:
    """Writes float and quantised bundles of the subject and runs both on held-out images.

    In processes of their own: the library and its experiments never import the exporter.
    """
    variant = next(v for v in job.variants if v.name == job.subject)
    run_dir = ablation.run_directory(workdir, variant, job.seeds[0], job.seeds)
    result, bundle = workdir / "export.json", workdir / "export"
    if result.is_file():
        return json.loads(result.read_text())
    prompts = workdir / "export_prompts.npz"
    save_prompts(job, plan, run_dir, prompts)
    python = [sys.executable, "-m"]
    subprocess.run(
        [*python, "export.to_tflite", f"--run={run_dir}", f"--out={bundle}", "--with_float",
         f"--gin_file={job.export_gin}"], check=True,
    )  # fmt: skip
    subprocess.run(
        [*python, "export.compare", f"--bundle=TFLite float={bundle}_float",
         f"--bundle=TFLite quantised={bundle}", f"--prompts={prompts}", f"--result={result}"],
        check=True,
    )  # fmt: skip
    return json.loads(result.read_text())


def save_prompts(job: Quickstart, plan: Ablation, run_dir: Path, path: Path) -> None:
    """Held-out prompts with JAX's greedy answers, as `export.compare` reads them."""
    run = serialize.load_run_config(run_dir)
    run = evaluation.eval_run(run, plan.eval_source, job.export_count)
    examples, prompts = next(evaluation.prompt_batches(run, job.export_count))
    weights = cli.load_weights(run_dir, run.model)
    answers = generate.generate(
        weights, prompts, jax.random.key(0), cfg=run.model, sampling=job.evaluation.sampling,
        stop=evaluation.stop_token(run),
    )  # fmt: skip
    count = len(examples)
    np.savez(
        path, tokens=prompts.tokens[:count], lengths=prompts.lengths[:count],
        image_index=prompts.image_index[:count], tiles=prompts.tiles,
        references=np.array([e.reference for e in examples]),
        jax_tokens=np.asarray(answers.tokens)[:count],
        jax_lengths=np.asarray(answers.lengths)[:count],
    )  # fmt: skip


def run_info(job: Quickstart, phases: Phases, workdir: Path) -> dict:
    """How the results were made."""
    peak = max(resource.getrusage(who).ru_maxrss for who in (
        resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))  # fmt: skip
    pages, device = job.pages, jax.devices()[0]
    rendered = {"stage-1 pages": pages.stage1_count, "stage-2 pages": pages.stage2_count,
                "held-out pages": pages.eval_count}  # fmt: skip
    own = {"training file": job.train_json, "held-out file": job.eval_json}
    model, stage1, stage2 = job.model, job.stage1, job.stage2
    return {
        "seeds": list(job.seeds),
        **cli.version(),
        "device": f"{device.platform}: {device.device_kind}, {cli.num_cores()} cores",
        "phases": [{"name": k, "seconds": v} for k, v in phases.seconds.items()],
        "peak_rss_mb": peak / 1024,
        "tile_size": model.vision.tile_size,
        "data": own if job.train_json else rendered,
        "steps": {"stage 1": stage1.steps, "stage 2 (each scheme)": stage2.steps},
        "config": {
            "parameters": cli.num_parameters(model),
            "vision": f"{model.vision.depth} layers of {model.vision.width}",
            "decoder": f"{model.decoder.depth} layers of {model.decoder.width}",
            "batch (stage 1, stage 2)": f"{job.stage1_data.batch_size}, "
            f"{job.stage2_data.batch_size}",
            "peak learning rate": f"{stage1.optim.peak_lr}, {stage2.optim.peak_lr}",
        },
        "design": "All schemes start from the same stage-1 weights and see the same images in the "
        "same steps, with the same fit, view order and thumbnail; only the grid differs.",
        "commands": ["make quickstart", f"python -m experiments.quickstart --workdir={workdir}"],
    }


def run_job(job: Quickstart, workdir: Path, export: bool) -> dict:
    """Everything, from pages to report; returns the results."""
    workdir.mkdir(parents=True, exist_ok=True)
    phases = Phases(workdir / "phases.json")
    sources = phases.run("data", lambda: make_sources(job, workdir))
    stage1, first = workdir / "stage1", stage1_run(job, sources.stage1)
    phases.run("stage 1", lambda: ablation.train_or_resume(first, stage1))
    plan = stage2_ablation(job, sources, stage1)
    schemes_read, samples = phases.run(
        "stage 2 and reading", lambda: ablation.run_ablation(plan, workdir)
    )
    exported, note = None, "the export was switched off with --noexport"
    if export:
        note = ""
        exported = phases.run("export", lambda: export_and_compare(job, plan, workdir))
    results = summarise.build_results(
        run_info(job, phases, workdir), schemes_read,
        references=[r.reference for r in samples], buckets=[r.bucket for r in samples],
        images=[r.image or "" for r in samples], subject=job.subject, export=exported,
        export_note=note,
    )  # fmt: skip
    report.write_report(results, workdir, image_root=".")
    return results


def main(_: list[str]) -> None:
    """Builds the job from gin, runs it, prints the table."""
    job = cli.build(quickstart, "gin_configs/quickstart.gin")
    if cli.DRY_RUN.value:
        print(gin_setup.describe(job))
        print(cli.model_summary(job.model))
        return
    workdir = Path(WORKDIR.value)
    start = time.monotonic()
    results = run_job(job, workdir, EXPORT.value)
    print(report.table_text(results))
    print(f"report: {workdir}/report.html   ({time.monotonic() - start:.0f} s in this start)")


if __name__ == "__main__":
    cli.run(main)
