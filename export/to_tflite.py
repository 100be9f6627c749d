r"""Exports a trained run to a bundle of .tflite files.

    python -m export.to_tflite --run=runs/quickstart/relaxed --out=runs/quickstart/export \
        --gin_file=gin_configs/export/quickstart.gin

Reads config.json and the newest checkpoint of the run; writes patch_embed, vit, projector, embedder
and decoder with a manifest of sizes and checksums. `--with_float` writes a second bundle beside it
(<out>_float) with float32 weights, to compare with. `--dry_run` prints what would be written.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from absl import flags

from bluelm_jax import checkpoints, params, serialize, vlm
from bluelm_jax.run_config import RunConfig
from export import build, bundle, prompt
from export import gin_setup as gin_setup
from export.config import ExportConfig, float_weights
from gin_configs import command

RUN = flags.DEFINE_string(
    "run", None, "Directory of the trained run (holds config.json).", required=True
)
CHECKPOINTS = flags.DEFINE_string("checkpoints", None, "Default: <run>/checkpoints.")
OUT = flags.DEFINE_string(
    "out", None, "Directory of the bundle; one that is there is replaced.", required=True
)
WITH_FLOAT = flags.DEFINE_bool("with_float", False, "Also write <out>_float, weights unquantised.")
flags.DEFINE_alias("workdir", "out")
flags.adopt_module_key_flags(command)


def describe(run: RunConfig, ex: ExportConfig) -> str:
    """What --dry_run prints: sizes, precisions, parameters of every part."""
    counts = {part: params.count(tree) for part, tree in vlm.specs(run.model).items()}
    lines = [f"  {field.name} = {getattr(ex, field.name)!r}" for field in dataclasses.fields(ex)]
    lines += [f"  {part:<12} {count:>15,} parameters" for part, count in counts.items()]
    shapes = build.shapes(run.model, ex)
    cache = 2 * 4 * shapes.depth * shapes.num_kv_heads * shapes.head_dim * shapes.cache_size
    return "\n".join([*lines, f"  KV cache     {cache / 2**20:.1f} MiB in float32"])


def table(manifest: bundle.Manifest, directory: Path) -> str:
    """File names and sizes of a bundle."""
    rows = [f"  {name:<22}{entry['bytes']:>14,} bytes" for name, entry in manifest.files.items()]
    total = sum(entry["bytes"] for entry in manifest.files.values())
    return "\n".join([str(directory), *rows, f"  {'total':<22}{total:>14,} bytes"])


def main() -> None:
    """Reads the run, lowers once, writes one bundle or two."""
    run = serialize.load_run_config(RUN.value)
    ex = command.build(ExportConfig)
    if command.DRY_RUN.value:
        print(describe(run, ex))
        return
    started = time.perf_counter()
    weights = checkpoints.restore_params(
        CHECKPOINTS.value or Path(RUN.value) / "checkpoints",
        params.abstract(vlm.specs(run.model)),
    )
    info, files = prompt.describe(run.data)
    lowered = build.lower_all(weights, run.model, ex)
    variants = {OUT.value: ex}
    if WITH_FLOAT.value:
        variants[f"{OUT.value}_float"] = float_weights(ex)
    for directory, variant in variants.items():
        manifest = build.write_bundle(
            lowered,
            weights,
            run.model,
            variant,
            directory,
            prompt=info,
            stop_id=prompt.stop_id(run.data),
            extra_files=files,
        )
        print(table(manifest, Path(directory)))
    print(f"exported in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    command.run(main)
