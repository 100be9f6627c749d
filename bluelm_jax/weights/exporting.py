"""A run's weights as folders that transformers reads: the inverse of `importing`.

    OUT/llm/        config.json, safetensors, tokenizer
    OUT/vision/     a SiglipVisionModel
    OUT/connector/  downsampler, projector and newline under our own names

Weights are read one stacked parameter at a time.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bluelm_jax import checkpoints, data_config, serialize, vlm
from bluelm_jax.data import templates
from bluelm_jax.data import tokenizer as tokenizers
from bluelm_jax.params import Param
from bluelm_jax.run_config import RunConfig
from bluelm_jax.weights import (
    atomic,
    chat_template,
    connector,
    convert,
    hf_export,
    names,
    tokenizer_files,
)
from bluelm_jax.weights.hf_export import Kind
from bluelm_jax.weights.importing import DTYPES, Keep
from bluelm_jax.weights.names import Part
from bluelm_jax.weights.plan import Shape, WeightsError, expand, source_shapes
from bluelm_jax.weights.shards import ShardWriter

Progress = Callable[[int], None]


def parts_of(run: RunConfig, stored: set[str]) -> dict[str, Part]:
    """The parts to write, by the name of their folder.

    Args:
      stored: parts of the model that the checkpoint has.
    """
    parts = {"llm": names.decoder_part(run.model.decoder)} if "decoder" in stored else {}
    if "vision" in stored:
        parts["vision"] = names.vision_part(run.model.vision)
    rest = connector.part(run.model)
    if rest.entries and {path.split("/")[0] for path in rest.declared()} <= stored:
        parts["connector"] = rest
    return parts


def export_run(
    directory: Path,
    out: Path,
    *,
    dtype: Keep = "keep",
    kind: Kind = "auto",
    max_bytes: int = 5 * 10**9,
    progress: Progress = lambda done: None,
) -> dict[str, int]:
    """Writes the newest weights of a run as folders below `out`, which must not exist.

    Args:
      dtype: of the weights written; 'keep' takes each as it is stored.
      kind: model type of the language model (`hf_export.decoder_json`).
      max_bytes: the most that one safetensors file holds.
      progress: called with the bytes done.

    Returns:
      Bytes of weights by folder.

    Raises:
      WeightsError: `out` exists, or the model has what no public layout can say.
      CheckpointError: the run has no checkpoint, or one of another model.
    """
    run = serialize.load_run_config(directory)
    stored = checkpoints.stored_params(directory)
    parts = parts_of(run, {path.split("/")[0] for path in stored})
    _check_stored(directory, run, stored, parts)
    configs = {name: _config(run, name, kind, dtype, stored) for name in parts}
    sizes = {}
    with atomic.new_folder(out) as partial:
        for name, part in parts.items():
            folder = partial / name
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(configs[name], indent=2) + "\n")
            before = sum(sizes.values())
            sizes[name] = _write_part(
                directory, folder, name, part, stored, DTYPES[dtype], max_bytes,
                lambda done, before=before: progress(before + done),
            )  # fmt: skip
        if "llm" in parts:
            _write_tokenizer(partial / "llm", run)
    return sizes


def total_bytes(directory: Path, dtype: Keep) -> int:
    """Bytes that `export_run` will write."""
    stored, target = checkpoints.stored_params(directory), DTYPES[dtype]
    return sum(math.prod(x.shape) * (target or x.dtype).itemsize for x in stored.values())


def _check_stored(directory: Path, run: RunConfig, stored: dict, parts: dict[str, Part]) -> None:
    """Raises WeightsError unless each part is stored as the run's config declares it."""
    known = names.declared(vlm.specs(run.model))
    wanted = {_path(name, path) for name, part in parts.items() for path in part.declared()}
    wrong = [f"{path}: missing" for path in wanted if path not in stored]
    wrong += [
        f"{path}: shape {x.shape}, config.json says {known[path].shape}"
        for path, x in stored.items()
        if path in known and x.shape != known[path].shape
    ]
    if wrong or not parts:
        raise WeightsError(f"{directory}: weights and config.json differ: {'; '.join(wrong[:8])}")


def _path(folder: str, path: str) -> str:
    """Path in the whole model of a path in a part."""
    return {"llm": "decoder/", "vision": "vision/", "connector": ""}[folder] + path


def _config(run: RunConfig, name: str, kind: Kind, dtype: Keep, stored: dict) -> dict[str, Any]:
    if name == "connector":
        return serialize.to_plain(run.model)
    top = "decoder" if name == "llm" else "vision"
    found = {x.dtype for path, x in stored.items() if path.startswith(top)}
    target = DTYPES[dtype]
    written = hf_export.dtype_name({np.dtype(target)} if target else found)
    if name == "llm":
        return hf_export.decoder_json(run.model.decoder, kind, written) | _token_ids(run)
    return hf_export.vision_json(run.model.vision, written)


def _write_part(
    directory: Path,
    folder: Path,
    name: str,
    part: Part,
    stored: dict[str, Any],
    dtype: np.dtype | None,
    max_bytes: int,
    progress: Progress,
) -> int:
    declared, naming = part.declared(), part.namings[0]
    tensors: dict[str, tuple[Shape, np.dtype]] = {}
    for entry in part.entries:
        p = declared[entry.path]
        shape = source_shapes(entry, p.shape[1:] if entry.stacked else p.shape)[0]
        kind = dtype or np.dtype(stored[_path(name, entry.path)].dtype)
        tensors |= dict.fromkeys(expand(entry, p, naming), (shape, kind))
    fillers = _fillers(part, declared)
    tensors |= {tensor: (x.shape, x.dtype) for tensor, x in fillers.items()}
    done = 0
    with contextlib.closing(ShardWriter(folder, _by_layer(tensors), max_bytes)) as writer:
        for entry in part.entries:
            path = _path(name, entry.path)
            x = _read(directory, path, stored[path])
            blocks = x if entry.stacked else x[None]
            spelt = expand(entry, declared[entry.path], naming)
            for tensor, block in zip(spelt, blocks, strict=True):
                block = convert.to_theirs(block, entry.transform)
                writer.write(tensor, block.astype(tensors[tensor][1], copy=False))
                done += block.size * tensors[tensor][1].itemsize
                progress(done)
        for tensor, x in fillers.items():
            writer.write(tensor, x)
    return done


def _fillers(part: Part, declared: dict[str, Param]) -> dict[str, np.ndarray]:
    """The final norm of a tower that is read before it: its class has one, so it gets scale 1."""
    if part.name != "vision" or "norm/scale" in declared:
        return {}
    width = declared["position"].shape[1]
    name = f"{names.VISION_PREFIX}post_layernorm"
    ones, zeros = np.ones(width, np.float32), np.zeros(width, np.float32)
    return {f"{name}.weight": ones, f"{name}.bias": zeros}


def _by_layer(tensors: dict[str, Any]) -> dict[str, Any]:
    """In the order of the layers, so that shards hold whole layers where they can."""

    def layer(name: str) -> int:
        return next((int(word) + 1 for word in name.split(".") if word.isdigit()), 0)

    return {name: tensors[name] for name in sorted(tensors, key=layer)}


def _read(directory: Path, path: str, leaf: Any) -> np.ndarray:
    abstract = convert.nest({path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)})
    (value,) = jax.tree.leaves(checkpoints.restore_part(directory, abstract))
    return np.asarray(value)


def _special(run: RunConfig) -> Iterator[tuple[str, str, int]]:
    """Role, text and id of the tokenizer's special tokens."""
    choice = run.data.tokenizer
    if isinstance(choice, data_config.TokenizerFile) and Path(choice.path).is_file():
        made = tokenizers.load(choice)
        for role in ("bos", "eos", "pad"):
            text = getattr(choice, role)
            if text is not None:
                token_id = made.token_id(text)
                if token_id is not None:
                    yield role, text, token_id


def _token_ids(run: RunConfig) -> dict[str, int]:
    return {f"{role}_token_id": token_id for role, _, token_id in _special(run)}


def _template(run: RunConfig) -> dict[str, str]:
    """Template and system text of a run: by name for us, as Jinja for others."""
    value = {tokenizer_files.TEMPLATE_KEY: run.data.template}
    if run.data.system:
        value[tokenizer_files.SYSTEM_KEY] = run.data.system
    text = chat_template.jinja(templates.get_template(run.data.template), run.data.system)
    return value if text is None else value | {"chat_template": text}


def _write_tokenizer(folder: Path, run: RunConfig) -> None:
    """Copies the tokenizer, if the run has one in a file, and names the template beside it."""
    choice = run.data.tokenizer
    if isinstance(choice, data_config.ByteTokens) or not Path(choice.path).is_file():
        return
    if isinstance(choice, data_config.SentencePieceFile):
        shutil.copyfile(choice.path, folder / tokenizer_files.SENTENCEPIECE_FILE)
        value = _template(run)
    else:
        shutil.copyfile(choice.path, folder / tokenizer_files.JSON_FILE)
        value = {"tokenizer_class": "PreTrainedTokenizerFast"}
        value |= {f"{role}_token": text for role, text, _ in _special(run)} | _template(run)
    (folder / tokenizer_files.CONFIG_FILE).write_text(
        json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
