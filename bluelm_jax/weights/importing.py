"""Model folders into a run folder that training, evaluation and generation take like any other.

    OUT/config.json        the RunConfig
    OUT/import.json        what was taken from where, and what was drawn
    OUT/tokenizer.json     (or tokenizer.model) copied from the language model
    OUT/checkpoints/0/     the weights

Everything is written beside OUT and moved there at the end: an import that was interrupted leaves
nothing that looks like one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from bluelm_jax import checkpoints, serialize, vlm
from bluelm_jax.checkpoint_stream import Streamed
from bluelm_jax.run_config import RunConfig
from bluelm_jax.weights import atomic, connector, convert, names, stream
from bluelm_jax.weights.folder import Folder
from bluelm_jax.weights.plan import Plan, WeightsError

Keep = Literal["keep", "float32", "bfloat16"]
DTYPES = {"keep": None, "float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sources:
    """Folders to import from; None leaves a part out.

    Attributes:
      vision: a SigLIP tower.
      llm: a language model.
      connector: downsampler, projector and newline, as `experiments.export_weights` writes them.
    """

    vision: Folder | None = None
    llm: Folder | None = None
    connector: Folder | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """What an import did.

    Attributes:
      parts: number of weights' elements by part of the model, and whether they were 'imported',
        'drawn' or (with 0) 'absent'.
      unused: known tensors of the folders that were left out.
      not_finite: infinities and NaNs, by weight.
      size: bytes of all weights written.
    """

    parts: dict[str, tuple[int, str]]
    unused: list[str]
    not_finite: dict[str, int]
    size: int


def plans(run: RunConfig, sources: Sources) -> dict[str, tuple[Folder, Plan]]:
    """What will be read for each source, after every check that headers allow.

    Raises:
      WeightsError: tensors that are missing, unknown or mis-shaped, or a tied head that differs.
    """
    found: dict[str, tuple[Folder, Plan]] = {}
    if sources.vision:
        # As stored: a table of positions for other tiles is resized on the way.
        native = sources.vision.vision_config().tile_size
        cfg = dataclasses.replace(run.model.vision, tile_size=native)
        found["vision"] = (sources.vision, sources.vision.plan(names.vision_part(cfg)))
    if sources.llm:
        part = names.decoder_part(run.model.decoder)
        found["decoder"] = (sources.llm, sources.llm.plan(part))
    if sources.connector:
        part = connector.part(run.model)
        found["connector"] = (sources.connector, sources.connector.plan(part))
    for folder, plan in found.values():
        stream.check_twins(folder, plan)
    return found


def weights_of(
    run: RunConfig,
    found: Mapping[str, tuple[Folder, Plan]],
    dtype: Keep,
    seed: int | None,
    watch: stream.Watch,
) -> tuple[dict[str, Streamed], set[str]]:
    """All weights to write by path, and which of them are drawn.

    Args:
      seed: draws what no source holds; None leaves it out.
    """
    out: dict[str, Streamed] = {}
    for name, (folder, plan) in found.items():
        leaves = stream.imported(folder, plan, DTYPES[dtype], watch)
        prefix = "" if name == "connector" else f"{name}/"
        out |= {prefix + path: leaf for path, leaf in leaves.items()}
    declared = names.declared(vlm.specs(run.model))
    place = "vision/position"
    if place in out and out[place].shape != declared[place].shape:
        side = run.model.vision.side
        out[place] = stream.resized_positions(place, out[place], side, watch)
    missing = declared.keys() - out.keys() if seed is not None else set()
    kind = DTYPES[dtype] or np.dtype(np.float32)
    for path in sorted(missing):
        out[path] = stream.drawn(path, declared[path], seed or 0, kind, watch)
    return {path: out[path] for path in declared if path in out}, set(missing)


@dataclasses.dataclass(frozen=True)
class Import:
    """An import that has passed every check that headers allow, ready to be written.

    Attributes:
      run: the run to write.
      found: folder and plan of each source.
      leaves: all weights by path.
      drawn: paths of those that come from the seed.
      watch: counts while they are written.
      provenance: what import.json says beside the counts.
    """

    run: RunConfig
    found: dict[str, tuple[Folder, Plan]]
    leaves: dict[str, Streamed]
    drawn: set[str]
    watch: stream.Watch
    provenance: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all weights."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in self.leaves.values())


def prepare(run: RunConfig, sources: Sources, dtype: Keep = "keep", seed: int | None = 0) -> Import:
    """Checks folders against the run's model and plans the import. Reads headers only.

    Args:
      dtype: of the stored weights; 'keep' stores each as its folder has it.
      seed: of the weights that no source holds; None leaves those parts out.

    Raises:
      WeightsError: anything wrong with the sources, or nothing to import.
    """
    found = plans(run, sources)
    if not found:
        raise WeightsError("nothing to import: no folder was given")
    watch = stream.Watch()
    leaves, drawn = weights_of(run, found, dtype, seed, watch)
    return Import(run, found, leaves, drawn, watch, _provenance(sources, dtype, seed))


def write(
    out: Path,
    prepared: Import,
    files: Mapping[str, Path] | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Report:
    """Writes the run folder `out`, which must not exist yet.

    Args:
      files: further files for the folder by name, copied from elsewhere (the tokenizer).
      progress: called with the bytes done.

    Raises:
      WeightsError: `out` exists, or a file of the sources cannot be read.
      CheckpointError: the folder cannot be written.
    """
    prepared.watch.progress = progress
    text = serialize.to_json(prepared.run)
    with atomic.new_folder(out) as partial:
        checkpoints.write_streamed(partial / "checkpoints", convert.nest(prepared.leaves), text)
        report = _report(prepared)
        (partial / "config.json").write_text(text, encoding="utf-8")
        (partial / "import.json").write_text(_import_json(prepared, report), encoding="utf-8")
        for name, path in (files or {}).items():
            shutil.copyfile(path, partial / name)
    return report


def _report(done: Import) -> Report:
    parts: dict[str, tuple[int, str]] = {}
    for part in vlm.specs(done.run.model):
        mine = [path for path in done.leaves if path.split("/")[0] == part]
        count = sum(math.prod(done.leaves[path].shape) for path in mine)
        how = "absent" if not mine else "drawn" if done.drawn & set(mine) else "imported"
        parts[part] = (count, how)
    return Report(parts, _left_out(done), done.watch.not_finite, done.size)


def _left_out(done: Import) -> list[str]:
    """Tensors that no part has read; a multimodal folder serves several."""
    plans = list(done.found.values())
    read = {
        (folder.path, name)
        for folder, plan in plans
        for name in (*(n for each in plan.reads for n in each.names), *dict(plan.twins))
    }
    unused = {(folder.path, name) for folder, plan in plans for name in plan.unused}
    return sorted(name for _, name in unused - read)


def _provenance(sources: Sources, dtype: Keep, seed: int | None) -> dict[str, Any]:
    def origin(folder: Folder | None) -> Any:
        if folder is None:
            return None
        return {
            "folder": str(folder.path.absolute()),
            "name": folder.config.get("_name_or_path"),
            "model_type": folder.config.get("model_type"),
        }

    fields = [field.name for field in dataclasses.fields(sources)]
    origins = {name: origin(getattr(sources, name)) for name in fields}
    return {"sources": origins, "dtype": dtype, "seed": seed}


def _import_json(done: Import, report: Report) -> str:
    parts = {name: {"parameters": n, "from": how} for name, (n, how) in report.parts.items()}
    value = {
        "parts": parts,
        **done.provenance,
        "unused_tensors": report.unused,
        "not_finite": report.not_finite,
    }
    return json.dumps(value, indent=2) + "\n"
