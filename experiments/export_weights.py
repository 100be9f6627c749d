"""Writes a run's weights as folders that transformers and others read.

    python -m experiments.export_weights --run=runs/stage2 --out=exported

makes exported/llm (a language model with its tokenizer), exported/vision (a SiglipVisionModel) and
exported/connector (downsampler and projector under our own names). import_weights reads all three
back, bit for bit.

A decoder with MiniCPM's scaling is written as granite, whose arithmetic is the same and whose class
transformers has; --as=minicpm writes the names that MiniCPM's own code reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from absl import flags

from bluelm_jax.weights import exporting, hf_export
from bluelm_jax.weights.importing import Keep
from experiments import cli
from gin_configs import command, errors

RUN = flags.DEFINE_string("run", None, "Directory of the run.", required=True)
OUT = flags.DEFINE_string("out", None, "Folder to make; must not exist.", required=True)
DTYPE = flags.DEFINE_enum(
    "dtype", "keep", ["keep", "float32", "bfloat16"], "Dtype of the written weights."
)
AS = flags.DEFINE_enum(
    "as", "auto", ["auto", "llama", "qwen2", "granite", "minicpm", "bluelm"],
    "Model type of the language model.",
)  # fmt: skip
SHARD_GB = flags.DEFINE_float("shard_gb", 5.0, "Gigabytes of one safetensors file.", lower_bound=0)


@errors.starts_anew()
def main() -> None:
    """Exports and says what there is."""
    run, dtype = Path(RUN.value), cast(Keep, DTYPE.value)
    total = exporting.total_bytes(run, dtype)
    with cli.byte_bar("exporting", total) as update:
        sizes = exporting.export_run(
            run, Path(OUT.value), dtype=dtype, kind=cast(hf_export.Kind, AS.value),
            max_bytes=int(SHARD_GB.value * 1e9), progress=update,
        )  # fmt: skip
    for name, size in sizes.items():
        print(f"{OUT.value}/{name}: {cli.size_text(size)} of weights")


if __name__ == "__main__":
    command.run(main)
