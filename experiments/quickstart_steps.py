"""The parts of the quickstart: data, stages, export, and what the report says of the run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np

from bluelm_jax import chat, generate, run_folder, serialize
from bluelm_jax.data import tokenizer
from bluelm_jax.data.rendering import reading_pages
from bluelm_jax.data_config import SourceConfig
from bluelm_jax.files import write_text
from bluelm_jax.run_config import RunConfig
from experiments import ablation, cli, evaluation, gin_setup, kept, provenance
from experiments.ablation import Ablation
from experiments.quickstart_config import Pages, Quickstart
from experiments.results import ExportResult, RunInfo

T = TypeVar("T")


class Phases:
    """Wall time of each part, kept in a file so that a resumed job reports all its time."""

    def __init__(self, path: Path):
        self._path = path
        self.seconds: dict[str, float] = kept.load(path, "seconds by phase") or {}

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Calls `work()` and adds its seconds to phase `name`."""
        start = time.monotonic()
        try:
            return work()
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start
            kept.save(self._path, "seconds by phase", self.seconds)


@dataclasses.dataclass(frozen=True)
class Sources:
    """The JSON files of the job and their image root."""

    stage1: SourceConfig
    train: SourceConfig
    evaluation: SourceConfig


def make_sources(job: Quickstart, workdir: Path) -> Sources:
    """The user's files, or pages rendered into `workdir`/data unless they are there.

    Raises:
      ValueError: pages of other settings are there.
    """
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
    if stamp.is_file() and stamp.read_text() != text:
        raise ValueError(
            f"{data} holds pages of other settings (compare {stamp}); choose another --workdir or "
            "remove that directory"
        )
    if not stamp.is_file():
        for name, look, split, count in wanted:
            print(f"rendering {count:,} pages: {name}", file=sys.stderr)
            reading_pages.write_split(data, look, seed=pages.seed, split=split, num_pages=count)
        write_text(stamp, text)
    return Sources(
        *(SourceConfig(path=str(data / f"{n}.json"), image_root=str(data)) for n, *_ in wanted)
    )


def serialize_pages(pages: Pages) -> str:
    """Tells whether rendered pages are the ones wanted."""
    return json.dumps(dataclasses.asdict(pages), indent=1) + "\n"


def job_text(job: Quickstart, export: bool) -> str:
    """Tells whether a finished job is the one wanted."""
    return json.dumps({"job": gin_setup.describe(job), "export": export}, indent=1) + "\n"


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


def export_and_compare(job: Quickstart, plan: Ablation, workdir: Path) -> ExportResult:
    """Writes float and quantised bundles of the subject and runs both on held-out images.

    In processes of their own: the library and its experiments never import the exporter.
    """
    variant = next(v for v in job.variants if v.name == job.subject)
    run_dir = ablation.run_directory(workdir, variant, job.seeds[0], job.seeds)
    result, bundle = workdir / "export.json", workdir / "export"
    settings = {
        "run": serialize.to_plain(serialize.load_run_config(run_dir)),
        "export": [job.export_gin, Path(job.export_gin).read_text(), job.export_count],
        "evaluation": dataclasses.asdict(job.evaluation),
    }
    done = kept.load(workdir / "export_kept.json", settings)
    if done is not None:
        return done
    prompts = workdir / "export_prompts.npz"
    save_prompts(job, plan, run_dir, prompts)
    _run(
        "export.to_tflite", f"--run={run_dir}", f"--out={bundle}", "--with_float",
        f"--gin_file={job.export_gin}",
    )  # fmt: skip
    _run(
        "export.compare", f"--bundle=TFLite float={bundle}_float",
        f"--bundle=TFLite quantised={bundle}", f"--prompts={prompts}", f"--result={result}",
    )  # fmt: skip
    compared = json.loads(result.read_text())
    kept.save(workdir / "export_kept.json", settings, compared)
    return compared


def _run(module: str, *arguments: str) -> None:
    """Runs a module in a process of its own; its output goes to this one's.

    Raises:
      ValueError: it failed; it has said why.
    """
    done = subprocess.run([sys.executable, "-m", module, *arguments], check=False)
    if done.returncode:
        raise ValueError(f"python -m {module} ended with status {done.returncode}, see above")


def save_prompts(job: Quickstart, plan: Ablation, run_dir: Path, path: Path) -> None:
    """Held-out prompts with JAX's greedy answers, as `export.compare` reads them."""
    trained, weights = run_folder.load(run_dir)
    run = evaluation.eval_run(trained, plan.eval_source, job.export_count)
    examples, prompts = next(evaluation.prompt_batches(run, job.export_count))
    answers = generate.generate(
        weights, prompts, jax.random.key(0), cfg=run.model, sampling=job.evaluation.sampling,
        stop=chat.stop_token(run, tokenizer.load(run.data.tokenizer)),
    )  # fmt: skip
    count = len(examples)
    np.savez(
        path, tokens=prompts.tokens[:count], lengths=prompts.lengths[:count],
        image_index=prompts.image_index[:count], tiles=prompts.tiles,
        references=np.array([e.reference for e in examples]),
        jax_tokens=np.asarray(answers.tokens)[:count],
        jax_lengths=np.asarray(answers.lengths)[:count],
    )  # fmt: skip


def run_info(job: Quickstart, phases: Phases) -> RunInfo:
    """How the results were made."""
    pages, model, stage1, stage2 = job.pages, job.model, job.stage1, job.stage2
    rendered = {
        "stage-1 pages": pages.stage1_count,
        "stage-2 pages": pages.stage2_count,
        "held-out pages": pages.eval_count,
    }
    own = {"training file": job.train_json, "held-out file": job.eval_json}
    batches = f"{job.stage1_data.batch_size}, {job.stage2_data.batch_size}"
    return provenance.run_info(
        task=f"the samples of {job.eval_json}" if job.eval_json else "rendered pages of digits",
        seeds=job.seeds,
        seconds=phases.seconds,
        tile_size=model.vision.tile_size,
        data=own if job.train_json else rendered,
        steps={"stage 1": stage1.steps, "stage 2 (each scheme)": stage2.steps},
        config={
            "parameters": cli.num_parameters(model),
            "vision": f"{model.vision.depth} layers of {model.vision.width}",
            "decoder": f"{model.decoder.depth} layers of {model.decoder.width}",
            "batch (stage 1, stage 2)": batches,
            "peak learning rate": f"{stage1.optim.peak_lr}, {stage2.optim.peak_lr}",
        },
        design="All schemes start from the same stage-1 weights and see the same images in the "
        "same steps, with the same fit, view order and thumbnail; only the grid differs.",
        commands=[provenance.command("experiments.quickstart")],
    )
