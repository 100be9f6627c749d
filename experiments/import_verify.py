"""Imported weights against transformers: the same inputs through both, in float32.

Needs torch and transformers beside JAX; without them it says so. The language model is asked for
logits of fixed token ids, the tower for features of random pixels.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange

from bluelm_jax import checkpoints, config, decoder, params, serialize, vision
from bluelm_jax.weights import hf_export
from bluelm_jax.weights.folder import Folder
from bluelm_jax.weights.importing import Sources

LENGTH, ROWS, TILES = 33, 2, 2


@dataclasses.dataclass(frozen=True)
class Verified:
    """Lines with the largest differences or why there are none; whether every part was compared."""

    text: str
    complete: bool


class _NotVerifiedError(Exception):
    """A part that cannot be compared; the message says which and why."""


def verify(out: Path, sources: Sources) -> Verified:
    """Compares the language model and the tower that were imported.

    Args:
      out: the imported run folder.
      sources: what it was imported from.
    """
    if not (sources.llm or sources.vision):
        return Verified("not verified: neither a language model nor a tower was imported", False)
    try:
        torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
    except ImportError as e:
        why = f"not verified: {e} (install torch and transformers in this environment)"
        return Verified(why, False)
    transformers.logging.set_verbosity_error()
    run = serialize.load_run_config(out)
    model = run.model
    parts = [(_decoder, sources.llm, model.decoder), (_vision, sources.vision, model.vision)]
    lines, complete = [], True
    with torch.no_grad():
        for compare, folder, cfg in parts:
            if folder is None:
                continue
            try:
                lines.append(compare(torch, transformers, out, folder, cfg))
            except _NotVerifiedError as e:
                lines.append(str(e))
                complete = False
    return Verified("\n".join(lines), complete)


def _restored(out: Path, part: str, specs: Any) -> Any:
    return checkpoints.restore_part(out, {part: params.abstract(specs)})[part]


def _decoder(torch: Any, transformers: Any, out: Path, folder: Folder, cfg: Any) -> str:
    tokens = np.random.default_rng(0).integers(0, cfg.vocab_size, (ROWS, LENGTH)).astype(np.int32)
    multimodal = "text_config" in folder.config
    auto = "AutoModelForImageTextToText" if multimodal else "AutoModelForCausalLM"
    try:
        with _readable(folder, cfg) as path:
            model = getattr(transformers, auto).from_pretrained(path, dtype=torch.float32)
    except (ValueError, KeyError, OSError) as e:
        why = f"language model not verified: transformers cannot load it: {_first_line(e)}"
        raise _NotVerifiedError(why) from e
    theirs = model.eval()(torch.from_numpy(tokens.astype(np.int64))).logits.numpy()
    del model
    weights = _restored(out, "decoder", decoder.specs(cfg))
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)

    @jax.jit
    def run(p: Any) -> jax.Array:
        x = decoder.embed_tokens(p, jnp.asarray(tokens), cfg, jnp.float32)
        x = decoder.forward(p, x, jnp.asarray(positions), jnp.ones(tokens.shape, jnp.int32), cfg)
        return decoder.logits(p, x, cfg)

    return _compared(f"language model, logits of {ROWS} x {LENGTH} tokens", run(weights), theirs)


def _vision(torch: Any, transformers: Any, out: Path, folder: Folder, cfg: Any) -> str:
    native = folder.vision_config()
    if cfg.tile_size != native.tile_size:
        raise _NotVerifiedError(
            f"tower not verified: its positions were resized for tiles of {cfg.tile_size} pixels"
        )
    try:
        model = transformers.AutoModel.from_pretrained(folder.path, dtype=torch.float32)
    except (ValueError, KeyError, OSError) as e:
        why = f"tower not verified: transformers cannot load it: {_first_line(e)}"
        raise _NotVerifiedError(why) from e
    tower = model
    for name in ("vision_model", "vision_tower"):  # Of models with text.
        tower = getattr(tower, name, tower)
    shape = (TILES, cfg.tile_size, cfg.tile_size, 3)
    tiles = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    states = tower.eval()(**_pixels(torch, tiles, cfg, folder), output_hidden_states=True)
    last = cfg.feature == "last"
    theirs = (states.last_hidden_state if last else states.hidden_states[-2]).numpy()
    del model, tower
    weights = _restored(out, "vision", vision.specs(cfg))
    ours = jax.jit(lambda p: vision.encode(p, jnp.asarray(tiles), cfg, jnp.float32))(weights)
    return _compared(f"tower, {cfg.feature} features of {TILES} tiles", ours, theirs)


def _pixels(torch: Any, tiles: np.ndarray, cfg: config.VisionConfig, folder: Folder) -> dict:
    """Normalised tiles as the tower takes them; the NaFlex towers of SigLIP 2 take patches."""
    pixels = tiles.astype(np.float32) / 127.5 - 1
    described = folder.config.get("vision_config", folder.config)
    if described.get("model_type") != "siglip2_vision_model":
        return {"pixel_values": torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy())}
    sides = {"h": cfg.side, "w": cfg.side}
    patches = rearrange(pixels, "i (h a) (w b) c -> i (h w) (a b c)", **sides)
    shape = torch.tensor([[cfg.side, cfg.side]] * len(tiles))
    mask = torch.ones(patches.shape[:2], dtype=torch.int32)
    return {
        "pixel_values": torch.from_numpy(patches),
        "pixel_attention_mask": mask,
        "spatial_shapes": shape,
    }


def _compared(what: str, ours: Any, theirs: np.ndarray) -> str:
    difference = float(np.abs(np.asarray(ours) - theirs).max())
    scale = float(np.abs(theirs).max())
    return f"{what}: max |difference| {difference:.2e}, max |value| {scale:.2f}"


def _first_line(e: Exception) -> str:
    return (str(e).strip().splitlines() or [type(e).__name__])[0][:200]


class _readable:
    """The folder as transformers can load it: MiniCPM under the name of its twin, granite."""

    def __init__(self, folder: Folder, cfg: config.DecoderConfig):
        self._folder, self._cfg, self._made = folder, cfg, None

    def __enter__(self) -> Path:
        if str(self._folder.config.get("model_type")).lower() != "minicpm":
            return self._folder.path
        self._made = tempfile.TemporaryDirectory()
        path = Path(self._made.name)
        for file in self._folder.path.glob("*.safetensors*"):
            os.symlink(file.absolute(), path / file.name)
        text = json.dumps(hf_export.decoder_json(self._cfg, "granite"))
        (path / "config.json").write_text(text)
        return path

    def __exit__(self, *exc: object) -> None:
        if self._made:
            self._made.cleanup()
