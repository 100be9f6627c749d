r"""Trains and compares the variants of an ablation, and writes the report.

    python -m experiments.ablate --workdir=runs/schemes \
        --gin_file=gin_configs/ablations/llava_schemes.gin

Each variant and seed trains in `workdir`/<variant>[-seed<n>] from the same start with the same data
order; finished arms are kept, an interrupted one continues. `--dry_run` prints what each arm's images
become: tokens, row length, tiles a batch.
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


def design(plan: Ablation) -> str:
    """What the arms have in common."""
    if plan.compared == "tiling scheme":
        return (
            "All variants start from the same weights and see the same samples in the same steps."
        )
    return (
        "All variants see the same samples in the same steps; parts that they have in common start "
        "from the same weights."
    )


def run_info(plan: Ablation, seconds: float) -> RunInfo:
    """How the results were made."""
    base = plan.base
    return provenance.run_info(
        task=f"the samples of {plan.eval_source.path}",
        seeds=plan.seeds,
        seconds={"training and reading": seconds},
        tile_size=base.model.vision.tile_size,
        data={"held-out file": plan.eval_source.path},
        steps={"each variant": base.train.steps},
        config={"parameters": parameters(plan), "template": base.data.template},
        compared=plan.compared,
        design=design(plan),
        commands=[provenance.command("experiments.ablate")],
    )


def main() -> None:
    """Builds the ablation from gin and runs it."""
    plan = command.build(Ablation)
    if command.DRY_RUN.value:
        print(gin_setup.describe(plan.base))
        print(cli.model_summary(plan.base.model))
        print(describe_arms(plan))
        return
    workdir, start = Path(WORKDIR.value), time.monotonic()
    ablation.check_held_out(plan)
    schemes, samples = ablation.run_ablation(plan, workdir)
    results = summarise.build_results(
        run_info(plan, time.monotonic() - start), schemes,
        references=[r.reference for r in samples], buckets=[r.bucket for r in samples],
        images=[r.image or "" for r in samples], subject=plan.subject,
        export_note="an ablation does not export",
    )  # fmt: skip
    report.write_report(results, workdir, image_root=".")
    print(report.table_text(results))
    print(f"report: {workdir}/report.html")


if __name__ == "__main__":
    command.run(main)
