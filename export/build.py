"""Parameters -> bundle: build graphs, lower, quantise, write, describe."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from bluelm_jax import config, layout, serialize
from bluelm_jax.params import Tree
from export import bundle, graphs, lower, quantize
from export.config import ExportConfig


def shapes(cfg: config.VLMConfig, ex: ExportConfig) -> bundle.Shapes:
    """The numbers of a model and an export that go into the manifest."""
    return bundle.Shapes(
        tile_size=cfg.vision.tile_size,
        tokens_per_tile=layout.tokens_per_view(layout.token_side(cfg)),
        tile_batch=ex.tile_batch,
        prefill_chunk=ex.prefill_chunk,
        cache_size=ex.cache_size,
        width=cfg.decoder.width,
        depth=cfg.decoder.depth,
        num_kv_heads=cfg.decoder.num_kv_heads,
        head_dim=cfg.decoder.head_dim,
        rope_theta=cfg.decoder.rope_theta,
        vocab_size=cfg.decoder.vocab_size,
    )


def lower_all(p: Tree, cfg: config.VLMConfig, ex: ExportConfig) -> dict[str, bytes]:
    """Every model as a float32 flatbuffer, by name.

    Args:
      p: the parameter tree of `vlm.specs(cfg)`.
      cfg: the model.
      ex: sizes; precisions play no part yet.
    """
    return {model.name: lower.to_tflite(model) for model in graphs.build(p, cfg, ex)}


def write_bundle(
    lowered: dict[str, bytes],
    p: Tree,
    cfg: config.VLMConfig,
    ex: ExportConfig,
    directory: str | Path,
    *,
    prompt: dict[str, Any] | None = None,
    stop_id: int | None = None,
    extra_files: Mapping[str, Path] = MappingProxyType({}),
) -> bundle.Manifest:
    """Quantises float models by `ex` and writes a bundle.

    Several bundles can be made of what `lower_all` returned once: float, INT8, INT4.

    Args:
      lowered: float flatbuffers by model name, of the same sizes as `ex`.
      p: the parameter tree of `vlm.specs(cfg)`.
      cfg: the model.
      ex: sizes and precisions.
      directory: where the bundle goes; a bundle that is there already is replaced.
      prompt: the DataConfig as a plain dict (`prompt.describe`), so that a runner can turn an image
        and a question into a prompt.
      stop_id: token that ends an answer.
      extra_files: copied into the bundle, by their name there (a tokenizer).

    Raises:
      ValueError: quantisation broke a signature.
      BundleError: the directory holds something that is not a bundle.
    """
    directory = Path(directory)
    _prepare(directory)
    for name, data in lowered.items():
        quantized = quantize.quantize(data, quantize.rules(name, cfg, ex))
        (directory / f"{name}.tflite").write_bytes(quantized)
    names = [f"{name}.tflite" for name in lowered]
    if cfg.newline:
        np.save(directory / bundle.NEWLINE_FILE, np.asarray(p["newline"], np.float32))
        names.append(bundle.NEWLINE_FILE)
    for name, path in extra_files.items():
        shutil.copyfile(path, directory / name)
        names.append(name)
    manifest = bundle.Manifest(
        shapes=shapes(cfg, ex),
        export=dataclasses.asdict(ex),
        model=serialize.to_plain(cfg),
        prompt=prompt,
        stop_id=stop_id,
        files=bundle.describe_files(directory, names),
    )
    bundle.write_manifest(directory, manifest)
    return bundle.load(directory)


def _prepare(directory: Path) -> None:
    """Makes the directory; an older bundle in it is invalid from here on."""
    directory.mkdir(parents=True, exist_ok=True)
    manifest = directory / bundle.MANIFEST
    known = {f"{model}.tflite" for model in bundle.MODELS} | {bundle.MANIFEST, bundle.NEWLINE_FILE}
    strangers = sorted(path.name for path in directory.iterdir() if path.name not in known)
    if strangers and not manifest.is_file():
        raise bundle.BundleError(
            f"{directory} holds other files ({', '.join(strangers[:3])}); name a new directory"
        )
    manifest.unlink(missing_ok=True)
