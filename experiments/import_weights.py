"""Makes a run folder of public weights: a SigLIP tower, a language model, or both.

    python -m experiments.import_weights --vision=siglip-so400m --llm=MiniCPM-2B --out=runs/imported

The folders are what Hugging Face's `save_pretrained` writes, with safetensors. The result serves as
`--run` of generate, evaluate and export_weights, and training starts from it with
`TrainConfig.init_from = 'runs/imported'`. docs/weights.md says what is accepted and what is checked.

A model may be given with --gin_file; the folders must then hold that model. With --llm alone and no
model, the result answers text only.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, cast

from absl import flags

from bluelm_jax.run_config import RunConfig
from bluelm_jax.weights import hf_run, importing, model_config, tokenizer_files
from bluelm_jax.weights.folder import Folder
from bluelm_jax.weights.importing import Report, Sources
from experiments import cli, gin_setup, import_verify
from gin_configs import binding, command, errors

VISION = flags.DEFINE_string("vision", None, "Folder of a SigLIP model or vision tower.")
LLM = flags.DEFINE_string("llm", None, "Folder of a language model.")
CONNECTOR = flags.DEFINE_string(
    "connector", None, "Folder of downsampler and projector, from experiments.export_weights."
)
OUT = flags.DEFINE_string("out", None, "Folder to make; must not exist.", required=True)
DTYPE = flags.DEFINE_enum(
    "dtype", "keep", ["keep", "float32", "bfloat16"], "Dtype of the stored weights."
)
SEED = flags.DEFINE_integer("seed", 0, "Seed of the weights that no folder holds.")
TEMPLATE = flags.DEFINE_string("template", None, "Conversation template; None recognises it.")
SYSTEM = flags.DEFINE_string("system", None, "System message of every conversation.")
VERIFY = flags.DEFINE_bool("verify", False, "Compare outputs with transformers, where installed.")
flags.adopt_module_key_flags(command)
DEFAULTS = "gin_configs/weights/import.gin"


def open_sources() -> Sources:
    """The folders that the flags name."""
    return Sources(
        vision=Folder(VISION.value) if VISION.value else None,
        llm=Folder(LLM.value) if LLM.value else None,
        connector=Folder(CONNECTOR.value) if CONNECTOR.value else None,
    )


def given_run() -> RunConfig | None:
    """The run that the gin flags describe; None without any."""
    files, bindings = command.GIN_FILE.value, command.GIN_BINDINGS.value
    if not (files or bindings):
        return None
    return binding.build(RunConfig, [DEFAULTS, *files], bindings)


def with_text(run: RunConfig, found: tokenizer_files.Found | None, given: bool) -> RunConfig:
    """`run` with the tokenizer and template of the language model.

    --template comes first, then the template of a given run, then what the folder looks like.
    """
    changes: dict[str, Any] = {} if SYSTEM.value is None else {"system": SYSTEM.value}
    if SYSTEM.value is None and found and found.system and not given:
        changes["system"] = found.system
    if found and found.choice:
        changes["tokenizer"] = found.choice
    template = TEMPLATE.value or (found.template if found and not given else None)
    if template:
        changes["template"] = template
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, **changes))
    if found:
        tokenizer_files.check_fits(found, run.data.template, run.model.decoder.vocab_size)
        print(text_summary(run, found, given))
    return run


def text_summary(run: RunConfig, found: tokenizer_files.Found, given: bool) -> str:
    """Which template and tokenizer the run has, and why."""
    template = f"{run.data.template!r} (--template)"
    if found.template == run.data.template:
        template = f"{run.data.template!r}, recognised in the folder"
    elif not TEMPLATE.value:
        template = f"{run.data.template!r}, of --gin_file"
    line = f"template: {template}"
    if not (TEMPLATE.value or given or found.template):
        line = f"no known chat template in the folder: using {run.data.template!r} (--template)"
    if not found.choice:
        return (
            f"{line}\nno tokenizer.json or tokenizer.model in the folder: the run has byte tokens"
        )
    roles = ((role, getattr(found.choice, role, None)) for role in ("bos", "eos", "pad"))
    tokens = "".join(f", {role} {token!r}" for role, token in roles if token)
    return f"{line}\ntokenizer: {found.path}{tokens}"


def plan_run(sources: Sources) -> tuple[RunConfig, tokenizer_files.Found | None, int | None]:
    """The run to write, its tokenizer, and the seed of what no folder holds."""
    given = given_run()
    model = model_config.model_for(sources, given.model if given else None)
    run = dataclasses.replace(given, model=model) if given else hf_run.default_run(model)
    found = None
    if sources.llm:
        found = tokenizer_files.find(sources.llm.path, sources.llm.config)
    run = with_text(run, found, given is not None)
    complete = given is not None or (sources.vision is not None and sources.llm is not None)
    return run, found, SEED.value if complete else None


def summary(out: Path, report: Report) -> str:
    """What was imported, what was drawn, what was left out, what looks wrong."""
    lines = [f"{out}: {cli.size_text(report.size)} of weights"]
    lines += [f"  {part:<12} {n:>15,}   {how}" for part, (n, how) in report.parts.items()]
    if report.unused:
        some = ", ".join(report.unused[:3])
        lines.append(f"  left out: {len(report.unused)} known tensors, such as {some}")
    if report.not_finite:
        total = sum(report.not_finite.values())
        worst = sorted(report.not_finite.items(), key=lambda item: -item[1])[:4]
        shown = ", ".join(f"{path}: {n:,}" for path, n in worst)
        lines.append(
            f"  WARNING: {total:,} values are infinite or not a number, in "
            f"{len(report.not_finite)} weights ({shown})"
        )
    return "\n".join(lines)


@errors.starts_anew()
def main() -> None:
    """Imports, and verifies if asked to."""
    if not (VISION.value or LLM.value or CONNECTOR.value):
        raise ValueError("name what to import: --vision, --llm or both")
    sources = open_sources()
    run, found, seed = plan_run(sources)
    prepared = importing.prepare(run, sources, cast(importing.Keep, DTYPE.value), seed)
    if command.DRY_RUN.value:
        print(gin_setup.describe(run))
        print(cli.model_summary(run.model))
        return
    files = {found.path.name: found.path} if found and found.path else {}
    out = Path(OUT.value)
    with cli.byte_bar("importing", prepared.size) as update:
        report = importing.write(out, prepared, files, update)
    print(summary(out, report))
    if VERIFY.value:
        verified = import_verify.verify(out, sources)
        print(verified.text)
        if not verified.complete:
            print(f"error: --verify: not verified, see above; {out} is written", file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    command.run(main)
