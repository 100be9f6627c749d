"""A bundle: the directory that a phone or the runner takes, with a manifest and checksums.

    manifest.json       format, sizes, precision, prompt information, checksums
    <model>.tflite      patch_embed, vit, projector, embedder, decoder
    newline.npy         the learned newline vector, for models that have one

Reading needs NumPy only: no JAX, no TensorFlow.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = "bluelm_jax.bundle"
VERSION = 1
VISION_MODELS = ("patch_embed", "vit", "projector")
MODELS = (*VISION_MODELS, "embedder", "decoder")
NEWLINE_FILE = "newline.npy"


class BundleError(ValueError):
    """A bundle that is incomplete, damaged or of another version; the message names the file."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """The numbers that a runner needs, written out so that it needs no model code.

    Attributes:
      tile_size: side of a tile, pixels.
      tokens_per_tile: image tokens of a tile, Q.
      tile_batch: tiles a call, I.
      prefill_chunk: prompt positions a call, T.
      cache_size: positions of the KV cache, C.
      width: decoder width, D.
      depth: decoder blocks.
      num_kv_heads: key/value heads, K.
      head_dim: head width, H.
      rope_theta: base of the rotary embedding's frequencies.
      vocab_size: token ids run below this.
    """

    tile_size: int
    tokens_per_tile: int
    tile_batch: int
    prefill_chunk: int
    cache_size: int
    width: int
    depth: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    vocab_size: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What manifest.json holds.

    Attributes:
      shapes: see `Shapes`.
      export: the ExportConfig as a dict: sizes and precisions.
      model: the VLMConfig as a plain dict, for the record.
      prompt: the DataConfig (tokenizer, template, tiling, layout) as a plain dict, or None.
      stop_id: token that ends an answer, or None.
      files: name -> {"bytes": size, "sha256": checksum}.
    """

    shapes: Shapes
    export: dict[str, Any]
    model: dict[str, Any]
    prompt: dict[str, Any] | None
    stop_id: int | None
    files: dict[str, dict[str, Any]]


def sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def describe_files(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Size and checksum of files of a directory."""
    return {
        name: {"bytes": (directory / name).stat().st_size, "sha256": sha256(directory / name)}
        for name in names
    }


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Writes manifest.json; written last, it marks a complete bundle."""
    plain = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(manifest)}
    (directory / MANIFEST).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")


def load(directory: str | Path, *, verify: bool = True) -> Manifest:
    """Reads a manifest and holds the files against it.

    Args:
      directory: the bundle.
      verify: compare checksums too; sizes are always compared.

    Raises:
      BundleError: no manifest, another format or version, a file missing, of another size or with
        another checksum. All broken files are named at once.
    """
    directory = Path(directory)
    manifest = _parse(directory / MANIFEST)
    missing_models = [m for m in MODELS if f"{m}.tflite" not in manifest.files]
    problems = [f"{m}.tflite: not in the manifest" for m in missing_models]
    for name, entry in manifest.files.items():
        problems += _file_problems(directory / name, entry, verify)
    if problems:
        raise BundleError(f"bundle {directory} is damaged: " + "; ".join(problems))
    return manifest


def _parse(path: Path) -> Manifest:
    if not path.is_file():
        raise BundleError(f"{path}: no such file; is {path.parent} an export directory?")
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        found = (plain.pop("format"), plain.pop("version"))
        if found != (FORMAT, VERSION):
            raise BundleError(f"{path}: format {found}, this runner reads {(FORMAT, VERSION)}")
        for name, entry in plain["files"].items():
            if Path(name).name != name or not isinstance(entry["bytes"], int):
                raise ValueError(f"entry {name!r} names no file of the bundle, or no size")
            str(entry["sha256"])
        return Manifest(**{**plain, "shapes": Shapes(**plain["shapes"])})
    except BundleError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BundleError(f"{path}: not a bundle manifest: {error}") from error


def _file_problems(path: Path, entry: dict[str, Any], verify: bool) -> list[str]:
    if not path.is_file():
        return [f"{path.name}: missing"]
    size = path.stat().st_size
    if size != entry["bytes"]:
        return [f"{path.name}: {size} bytes, the manifest says {entry['bytes']}"]
    if verify and sha256(path) != entry["sha256"]:
        return [f"{path.name}: checksum differs from the manifest's"]
    return []
