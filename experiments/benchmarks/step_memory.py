"""Memory of a full-size training step, as the TPU compiler plans it; no TPU is needed.

    pip install -r requirements.txt -r requirements-tpu.txt
    python -m experiments.benchmarks.step_memory --topology=v5e:4x4 \\
        --gin_file=gin_configs/train/bluelm_v_stage2.gin \\
        --gin_bindings="SourceConfig.path = 'data.json'"

Compiles `train.train_step` of the config for a topology of chips that are not there and prints the
compiler's memory analysis of one chip, the largest arrays of its program by shape, and whether float32
scores of all pairs of positions or logits of all positions are among them. The data is not read.
Set batch_size and tile_groups to the rows of the whole mesh. `--blocks=512,0` compiles the step twice,
with attention in blocks of 512 queries and with all at once. A compilation takes minutes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import time
from collections.abc import Sequence
from typing import Any

import jax
from absl import flags
from jax.experimental import topologies

from bluelm_jax import flops, layout, sharding, train, train_state
from bluelm_jax.run_config import RunConfig
from experiments import gin_setup as gin_setup
from gin_configs import command

TOPOLOGY = flags.DEFINE_string("topology", "v5e:4x4", "Chips to compile for, as libtpu names them.")
BLOCKS = flags.DEFINE_list("blocks", None, "Values of DecoderConfig.attention_block to compare.")
LARGEST = flags.DEFINE_integer("largest", 6, "How many shapes to list.", lower_bound=0)
flags.adopt_module_key_flags(command)

_BYTES = {"f32": 4, "bf16": 2, "s32": 4, "u8": 1, "pred": 1}


def compile_step(run: RunConfig, devices: Sequence[Any]) -> Any:
    """The compiled training step of `run` over `devices`."""
    mesh = sharding.make_mesh(run.train.mesh, devices)
    train.check_mesh(run, mesh)
    data = run.data
    batch = flops.abstract_batch(
        run.model,
        data.batch_size,
        data.seq_len,
        data.tile_groups,
        data.tiles_per_group,
        corners=layout.resizes(data.layout),
    )

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        where = sharding.named(mesh, "batch", *(None,) * (len(x.shape) - 1))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    state = train_state.abstract_state(run, mesh)
    shardings = train_state.state_shardings(run, mesh)
    step = jax.jit(
        functools.partial(train.train_step, run=run),
        donate_argnums=0,
        out_shardings=(shardings, None),
    )
    with jax.set_mesh(mesh):
        return step.lower(state, jax.tree.map(place, batch)).compile()


def array_shapes(program: str) -> dict[tuple[str, tuple[int, ...]], int]:
    """Bytes of every array shape in a compiled program, by dtype and dimensions."""
    found = set(re.findall(r"\b(f32|bf16|s32|u8|pred)\[([\d,]+)\]", program))
    shapes = {(dtype, tuple(map(int, dims.split(",")))) for dtype, dims in found}
    return {(d, s): _BYTES[d] * math.prod(s) for d, s in shapes}


def report(run: RunConfig, compiled: Any, seconds: float) -> None:
    """Prints the memory analysis of one chip and what stands out in its program."""
    memory = compiled.memory_analysis()
    gib = 2**30
    print(f"attention_block = {run.model.decoder.attention_block}, compiled in {seconds:.0f} s")
    print(f"  state and batch   {memory.argument_size_in_bytes / gib:7.2f} GiB a chip")
    print(f"  temporary         {memory.temp_size_in_bytes / gib:7.2f} GiB a chip")
    shapes = array_shapes(compiled.as_text())
    for (dtype, dims), size in sorted(shapes.items(), key=lambda x: -x[1])[: LARGEST.value]:
        print(f"    {dtype}{list(dims)}  {size / gib:.2f} GiB")
    length, vocabulary = run.data.seq_len, run.model.decoder.vocab_size
    for what, ok in (
        ("scores of all pairs of positions", lambda s: sum(d % length == 0 for d in s) >= 2),
        ("logits of all positions", lambda s: length in s and vocabulary in s),
    ):
        hits = [s for (dtype, s) in shapes if dtype == "f32" and ok(s)]
        print(f"  float32 {what}: {', '.join(map(str, hits)) or 'none'}")


def main() -> None:
    """Compiles and reports, once for each value of --blocks."""
    run = command.build(RunConfig)
    if command.DRY_RUN.value:
        print(gin_setup.describe(run))
        return
    topology = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGY.value)
    for block in BLOCKS.value or [run.model.decoder.attention_block]:
        decoder = dataclasses.replace(run.model.decoder, attention_block=int(block))
        model = dataclasses.replace(run.model, decoder=decoder)
        arm = dataclasses.replace(run, model=model)
        begin = time.monotonic()
        compiled = compile_step(arm, topology.devices)
        report(arm, compiled, time.monotonic() - begin)


if __name__ == "__main__":
    command.run(main)
