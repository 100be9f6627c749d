"""Imports random weights of SigLIP-400M and MiniCPM-2B at their true size, and measures it.

    python -m experiments.benchmarks.import_full_size --shard_gb=1

Writes both models as sharded bfloat16 safetensors (6.3 GB), runs `experiments.import_weights` on them
in a process of its own, and prints its time and largest resident memory beside the bound: 1.3 times
the largest shard plus the largest stacked parameter. Then compares some weights of the result with
the files, bit for bit, and removes everything. Needs about 13 GB below --dir.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from absl import app, flags, logging

from bluelm_jax import checkpoints, presets
from bluelm_jax.weights import convert, hf_export, names
from bluelm_jax.weights.folder import Folder
from bluelm_jax.weights.names import Part
from bluelm_jax.weights.plan import expand, source_shapes
from bluelm_jax.weights.shards import ShardWriter

DIR = flags.DEFINE_string("dir", None, "Where to write; None takes a temporary folder.")
SHARD_GB = flags.DEFINE_float("shard_gb", 1.0, "Gigabytes of one shard.")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
POOL = 2**25
IMPORTS = "import experiments.import_weights"
COMPARED = ("decoder/blocks/mlp/down/kernel", "decoder/embed", "vision/patch/kernel")


def write_random(folder: Path, part: Part, config_json: dict) -> int:
    """A model folder of random numbers; returns its bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config_json))
    declared, naming = part.declared(), part.namings[0]
    shapes = {}
    for entry in part.entries:
        p = declared[entry.path]
        shape = source_shapes(entry, p.shape[1:] if entry.stacked else p.shape)[0]
        shapes |= dict.fromkeys(expand(entry, p, naming), shape)
    shapes = dict(sorted(shapes.items()))
    tensors = {name: (shape, BFLOAT16) for name, shape in shapes.items()}
    writer = ShardWriter(folder, tensors, int(SHARD_GB.value * 1e9))
    pool = np.random.default_rng(0).standard_normal(POOL, np.float32).astype(BFLOAT16)
    for name, shape in shapes.items():
        size, start = math.prod(shape), zlib.crc32(name.encode()) % POOL
        repeats = -(-(start + size) // POOL)
        writer.write(name, np.tile(pool, repeats)[start : start + size])
    writer.close()
    return sum(math.prod(shape) * 2 for shape in shapes.values())


@dataclasses.dataclass(frozen=True)
class Measured:
    """A finished process: seconds, seconds of processor time, largest resident bytes, output."""

    seconds: float
    cpu: float
    peak: float
    text: str


def measured(command: list[str]) -> Measured:
    """Runs a process to its end.

    Its memory is read from /proc while it runs: what `wait4` reports includes this process, of which
    it was a copy for a moment.
    """
    start, peak = time.monotonic(), 0
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        done, status, usage = 0, 0, None
        while not done:
            time.sleep(0.2)
            peak = max(peak, high_water(process.pid))
            done, status, usage = os.wait4(process.pid, os.WNOHANG)
        output.seek(0)
        text = output.read()
    if status or usage is None:
        raise SystemExit(f"{' '.join(command)} failed:\n{text}")
    return Measured(time.monotonic() - start, usage.ru_utime + usage.ru_stime, peak, text)


def high_water(pid: int) -> int:
    """Largest resident bytes of a process so far; 0 once it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def largest_stacked(parts: list[Part]) -> int:
    """Bytes of the largest parameter as we hold it."""
    return max(math.prod(p.shape) * 2 for part in parts for p in part.declared().values())


def compare(out: Path, folders: dict[str, Path], parts: dict[str, Part]) -> int:
    """Values of some weights that were compared with the files; raises if any differs."""
    compared = 0
    stored = checkpoints.stored_params(out)
    for path in COMPARED:
        top, _, inner = path.partition("/")
        (read,) = (r for r in Folder(folders[top]).plan(parts[top]).reads if r.entry.path == inner)
        leaf = stored[path]
        abstract = convert.nest({path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)})
        (value,) = jax.tree.leaves(checkpoints.restore_part(out, abstract))
        blocks = np.asarray(value) if read.entry.stacked else np.asarray(value)[None]
        tensors = Folder(folders[top])
        for name, block in zip(read.names, blocks, strict=True):
            ours = convert.to_ours(tensors[name], read.entry.transform, read.shape)
            if not np.array_equal(ours.view(np.uint16), block.view(np.uint16)):
                raise SystemExit(f"{path}: differs from {name}")
            compared += block.size
    return compared


def main(_: list[str]) -> None:
    """Writes, imports, compares, prints."""
    logging.set_verbosity(logging.WARNING)
    vision, llm = presets.siglip_so400m(), presets.minicpm_2b()
    parts = {"vision": names.vision_part(vision), "decoder": names.decoder_part(llm)}
    with tempfile.TemporaryDirectory(dir=DIR.value) as name:
        folders = {"vision": Path(name) / "vision", "decoder": Path(name) / "llm"}
        size = write_random(folders["vision"], parts["vision"], hf_export.vision_json(vision))
        llm_json = hf_export.decoder_json(llm, "minicpm")
        size += write_random(folders["decoder"], parts["decoder"], llm_json)
        shard = max(Folder(folder).largest_file() for folder in folders.values())
        out = Path(name) / "imported"
        idle = measured([sys.executable, "-c", IMPORTS]).peak
        command = [sys.executable, "-m", "experiments.import_weights"]
        flag = {"vision": folders["vision"], "llm": folders["decoder"], "out": out}
        done = measured([*command, *(f"--{key}={value}" for key, value in flag.items())])
        compared = compare(out, folders, parts)
    stacked = largest_stacked(list(parts.values()))
    bound = 1.3 * shard + stacked
    print("\n".join(x for x in done.text.splitlines() if x.endswith(("imported", "drawn"))))
    print(f"weights {size / 1e9:.2f} GB in shards of up to {shard / 1e6:,.0f} MB")
    print(f"time {done.seconds:.1f} s, {done.cpu:.1f} s of processor time")
    print(f"peak resident memory {done.peak / 1e6:,.0f} MB; modules alone {idle / 1e6:,.0f} MB")
    print(
        f"bound 1.3 x {shard / 1e6:,.0f} + {stacked / 1e6:,.0f} (largest stacked parameter) = "
        f"{bound / 1e6:,.0f} MB: {'kept' if done.peak <= bound else 'EXCEEDED'}"
    )
    print(f"{compared:,} values compared with the files: equal")


if __name__ == "__main__":
    app.run(main)
