r"""Trains and compares the variants of an ablation, and writes the report.

    python -m experiments.ablate --workdir=runs/schemes \
        --gin_file=gin_configs/ablations/llava_schemes.gin

Each variant and seed trains in `workdir`/<variant>[-seed<n>] from the same start with the same data
order; finished arms are kept, an interrupted one continues. `--dry_run` prints what each arm's images
become: tokens, row length, tiles a batch.

`--only=vila,avg_pool` trains and compares these variants alone. They share their folders with the full
plan; the report goes to `workdir`/only-vila-avg_pool, beside that of the full plan.
"""

from __future__ import annotations

import time
from pathlib import Path

from absl import flags

from bluelm_jax import layout
from experiments import ablation, cli, gin_setup, provenance, report, summarise
from experiments.ablation import Ablation
from experiments.results import RunInfo
from gin_configs import command

WORKDIR = flags.DEFINE_string("workdir", None, "Directory of all runs.", required=True)
ONLY = flags.DEFINE_list("only", None, "Names of the variants to compare; default: all.")
flags.adopt_module_key_flags(command)


def describe_arms(plan: Ablation) -> str:
    """Parameters, tokens a view, row length and tiles of every arm, from image headers."""
    heads = f"{'parameters':>16}{'tokens a view':>16}{'positions':>12}{'tiles a group':>16}"
    lines = [f"{'variant':<20}{heads}"]
    for variant in plan.variants:
        run = ablation.variant_run(plan.base, variant, plan.seeds[0])
        tokens = layout.tokens_per_view(run.token_side)
        lines.append(
            f"{variant.name:<20}{cli.num_parameters(run.model):>16,}{tokens:>16,}"
            f"{run.data.seq_len:>12,}{run.data.tiles_per_group:>16,}"
        )
    return "\n".join(lines)


def parameters(plan: Ablation) -> str:
    """Parameters of the model; of every arm where they differ."""
    counts = {v.label: cli.num_parameters(v.apply(plan.base).model) for v in plan.variants}
    if len(set(counts.values())) == 1:
        return f"{next(iter(counts.values())):,}"
    return ", ".join(f"{label} {count:,}" for label, count in counts.items())


def design(compared: str) -> str:
    """What the arms have in common."""
    if compared == "tiling scheme":
        return (
            "All variants start from the same weights and see the same samples in the same steps."
        )
    return (
        "All variants see the same samples in the same steps; parts that they have in common start "
        "from the same weights."
    )


def run_info(plan: Ablation, seconds: float, whole: Ablation | None = None) -> RunInfo:
    """How the results were made; `whole` is the plan that `plan` is a part of, if it is one."""
    base = plan.base
    # Of one arm alone it cannot be told what is compared.
    compared = (whole or plan).compared
    config = {"parameters": parameters(plan), "template": base.data.template}
    if whole is not None:
        names = ", ".join(v.name for v in plan.variants)
        config["variants"] = f"{names} (--only; {len(plan.variants)} of {len(whole.variants)})"
    return provenance.run_info(
        task=f"the samples of {plan.eval_source.path}",
        seeds=plan.seeds,
        seconds={"training and reading": seconds},
        tile_size=base.model.vision.tile_size,
        data={"held-out file": plan.eval_source.path},
        steps={"each variant": base.train.steps},
        config=config,
        compared=compared,
        design=design(compared),
        commands=[provenance.command("experiments.ablate")],
    )


def chosen_part(plan: Ablation) -> Ablation | None:
    """The part of the plan that --only names, said in a line; None without the flag."""
    if ONLY.value is None:
        return None
    part = ablation.select(plan, ONLY.value)
    names = ", ".join(v.name for v in part.variants)
    note = f"only {names}; compared with {part.subject}"
    if part.subject != plan.subject:
        note += f", as the plan's subject {plan.subject} is left out"
    print(note)
    return part


def report_directory(workdir: Path, plan: Ablation, whole: Ablation | None) -> Path:
    """Where the report goes: a part of a plan has a folder of its own beside the arms."""
    if whole is None:
        return workdir
    return workdir / f"only-{'-'.join(v.name for v in plan.variants)}"


def main() -> None:
    """Builds the ablation from gin and runs it."""
    full = command.build(Ablation)
    part = chosen_part(full)
    plan, whole = (full, None) if part is None else (part, full)
    if command.DRY_RUN.value:
        print(gin_setup.describe(plan.base))
        print(cli.model_summary(plan.base.model))
        print(describe_arms(plan))
        return
    workdir, start = Path(WORKDIR.value), time.monotonic()
    ablation.check_held_out(plan)
    schemes, samples = ablation.run_ablation(plan, workdir)
    results = summarise.build_results(
        run_info(plan, time.monotonic() - start, whole), schemes,
        references=[r.reference for r in samples], buckets=[r.bucket for r in samples],
        images=[r.image or "" for r in samples], subject=plan.subject,
        export_note="an ablation does not export",
    )  # fmt: skip
    folder = report_directory(workdir, plan, whole)
    report.write_report(results, folder, image_root=".")
    print(report.table_text(results))
    print(f"report: {folder}/report.html")


if __name__ == "__main__":
    command.run(main)
