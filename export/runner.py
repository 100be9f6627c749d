"""Runs a bundle on LiteRT with NumPy alone: no JAX, no model code.

As on the phone (BlueLM-V-3B, sec. 3.2-3.4): tiles are encoded in batches of fixed size, the prompt
is read in chunks of fixed length into a KV cache, its last token and every new one go through the
one-token signature, and the vision models can be unloaded in between.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from ai_edge_litert.interpreter import Interpreter

from bluelm_jax.layout import NEWLINE
from export import bundle
from export.config import RunnerConfig
from export.kv_cache import KVCache, attention_mask, rope_tables


class Stopwatch:
    """Milliseconds of every call, by stage."""

    def __init__(self):
        self.calls: dict[str, list[float]] = collections.defaultdict(list)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times a block as one call of `name`."""
        start = time.perf_counter()
        yield
        self.calls[name].append((time.perf_counter() - start) * 1e3)

    def median(self) -> dict[str, float]:
        """Median milliseconds of a call, by stage."""
        return {name: statistics.median(calls) for name, calls in self.calls.items()}


@dataclasses.dataclass(frozen=True)
class Answer:
    """Generated tokens without the stop token; `stopped` is False if they ran out."""

    tokens: list[int]
    stopped: bool


class LiteRTModel:
    """One .tflite file; its signatures share the mapped weights."""

    def __init__(self, path: Path, num_threads: int):
        # A path, not bytes: the interpreter maps the file.
        self._interpreter = Interpreter(str(path), num_threads=num_threads)
        self._runners = {
            name: self._interpreter.get_signature_runner(name)
            for name in self._interpreter.get_signature_list()
        }

    def run(self, signature: str, **inputs: np.ndarray) -> dict[str, np.ndarray]:
        """Outputs of one call, by name."""
        return self._runners[signature](**inputs)


class Runner:
    """An exported model, loaded.

    Args:
      directory: the bundle.
      config: threads and memory policy.
      verify: compare checksums before loading.

    Attributes:
      manifest: the bundle's manifest.
      times: stopwatch over the stages 'load', 'patch_embed', 'vit', 'projector', 'embedder',
        'prefill' and 'decode'; one entry a call.

    Raises:
      BundleError: the bundle is incomplete or damaged.
    """

    def __init__(
        self,
        directory: str | Path,
        config: RunnerConfig = RunnerConfig(),  # noqa: B008  (frozen)
        *,
        verify: bool = True,
    ):
        self._directory, self._config = Path(directory), config
        self.manifest = bundle.load(directory, verify=verify)
        self.shapes = self.manifest.shapes
        self.times = Stopwatch()
        self._cache = KVCache(self.shapes)
        self._newline = self._load_newline()
        self._models: dict[str, LiteRTModel] = {}
        for name in bundle.MODELS:
            self._model(name)

    def _load_newline(self) -> np.ndarray | None:
        if bundle.NEWLINE_FILE not in self.manifest.files:
            return None
        return np.load(self._directory / bundle.NEWLINE_FILE)

    def _model(self, name: str) -> LiteRTModel:
        if name not in self._models:
            with self.times.stage("load"):
                path = self._directory / f"{name}.tflite"
                self._models[name] = LiteRTModel(path, self._config.num_threads)
        return self._models[name]

    def _run(self, stage: str, model: str, signature: str, **inputs) -> dict[str, np.ndarray]:
        loaded = self._model(model)
        with self.times.stage(stage):
            return loaded.run(signature, **inputs)

    def free_vision(self) -> None:
        """Unloads the vision models; `encode` loads them again."""
        for name in bundle.VISION_MODELS:
            self._models.pop(name, None)

    def encode(self, tiles: np.ndarray) -> np.ndarray:
        """Image tokens of tiles, a fixed batch at a time; the last one is filled with zeros.

        Args:
          tiles: uint8 [V, S, S, 3], views of one or more images.

        Returns:
          float32 [V * Q, D].

        Raises:
          ValueError: tiles of another size or type.
        """
        s = self.shapes
        if tiles.dtype != np.uint8 or tiles.shape[1:] != (s.tile_size, s.tile_size, 3):
            raise ValueError(
                f"tiles {tiles.dtype} {list(tiles.shape)}: must be uint8 "
                f"[V, {s.tile_size}, {s.tile_size}, 3]"
            )
        tokens = [np.zeros((0, s.width), np.float32)]
        for start in range(0, len(tiles), s.tile_batch):
            part = tiles[start : start + s.tile_batch]
            batch = np.zeros((s.tile_batch, *tiles.shape[1:]), np.uint8)
            batch[: len(part)] = part
            x = self._run("patch_embed", "patch_embed", "patch_embed", tiles=batch)["patches"]
            x = self._run("vit", "vit", "vit", patches=x)["features"]
            x = self._run("projector", "projector", "projector", features=x)["image_tokens"]
            tokens.append(x[: len(part)].reshape(-1, s.width))
        return np.concatenate(tokens)

    def embed(self, tokens: np.ndarray, signature: str) -> np.ndarray:
        """Text embeddings [T, D] of T token ids, T being the signature's length."""
        ids = tokens.astype(np.int32)[None]
        return self._run("embedder", "embedder", signature, token_ids=ids)["embeddings"][0]

    def _splice(self, text: np.ndarray, image_index: np.ndarray, images: np.ndarray) -> np.ndarray:
        """Text embeddings with image tokens and newline vectors put in their places."""
        x = text.copy()
        x[image_index >= 0] = images[image_index[image_index >= 0]]
        if self._newline is not None:
            x[image_index == NEWLINE] = self._newline
        return x

    def _extend(self, x: np.ndarray, count: int, signature: str) -> dict[str, np.ndarray]:
        """Runs [T, D] embeddings, of which `count` count, and appends them to the cache."""
        s, past = self.shapes, self._cache.length
        cos, sin = rope_tables(past, len(x), s.head_dim, s.rope_theta)
        outputs = self._run(
            "decode" if signature == "decode" else "prefill",
            "decoder",
            signature,
            embeddings=x[None],
            mask=attention_mask(past, s.cache_size, len(x)),
            pos_emb_cos=cos,
            pos_emb_sin=sin,
            **self._cache.inputs(),
        )
        self._cache.append(outputs, count)
        return outputs

    def prefill(self, tokens: np.ndarray, image_index: np.ndarray, images: np.ndarray) -> None:
        """Appends positions to the cache, `prefill_chunk` at a time, the last chunk padded."""
        chunk = self.shapes.prefill_chunk
        signature = f"prefill_{chunk}"
        for start in range(0, len(tokens), chunk):
            count = min(chunk, len(tokens) - start)
            ids, index = np.zeros(chunk, np.int32), np.full(chunk, -1, np.int32)
            ids[:count] = tokens[start : start + count]
            index[:count] = image_index[start : start + count]
            x = self._splice(self.embed(ids, signature), index, images)
            self._extend(x, count, signature)

    def decode(self, token: int, image_index: int, images: np.ndarray) -> np.ndarray:
        """Appends one position; returns the logits [V] that follow it."""
        text = self.embed(np.array([token]), "decode")
        x = self._splice(text, np.array([image_index]), images)
        return self._extend(x, 1, "decode")["logits"][0, 0]

    def generate(
        self,
        tiles: np.ndarray,
        tokens: np.ndarray,
        image_index: np.ndarray,
        *,
        max_new_tokens: int | None = None,
        stop_id: int | None = None,
    ) -> Answer:
        """Continues a prompt greedily.

        Args:
          tiles: uint8 [V, S, S, 3], the views of all images in order; V may be 0.
          tokens: int [L], prompt ids; any valid id at image positions.
          image_index: int [L]: >= 0 an image token (view * Q + token), -1 text, -2 newline.
          max_new_tokens: bound, the stop token included; None takes the config's.
          stop_id: ends the answer; None takes the manifest's.

        Raises:
          ValueError: an empty prompt, one that does not fit the cache, an id or image index that
            does not exist, or a newline without a newline vector.
        """
        new = self._config.max_new_tokens if max_new_tokens is None else max_new_tokens
        stop = self.manifest.stop_id if stop_id is None else stop_id
        tokens, image_index = np.asarray(tokens), np.asarray(image_index)
        self._check_prompt(tokens, image_index, len(tiles), new)
        images = self.encode(tiles)
        if self._config.free_vision:
            self.free_vision()
        self._cache.clear()
        self.prefill(tokens[:-1], image_index[:-1], images)
        logits = self.decode(int(tokens[-1]), int(image_index[-1]), images)
        answer: list[int] = []
        while True:
            token = int(logits.argmax())
            if token == stop:
                return Answer(answer, stopped=True)
            answer.append(token)
            if len(answer) == new:
                return Answer(answer, stopped=False)
            logits = self.decode(token, -1, images)

    def _check_prompt(
        self, tokens: np.ndarray, image_index: np.ndarray, views: int, new: int
    ) -> None:
        s = self.shapes
        if tokens.ndim != 1 or len(tokens) == 0 or tokens.shape != image_index.shape:
            raise ValueError(
                f"tokens {list(tokens.shape)} and image_index {list(image_index.shape)}: "
                "must be equal, one-dimensional and not empty"
            )
        if len(tokens) + new > s.cache_size:
            raise ValueError(
                f"prompt of {len(tokens)} + {new} new tokens: must fit cache_size = {s.cache_size}"
            )
        if tokens.min() < 0 or tokens.max() >= s.vocab_size:
            raise ValueError(
                f"token ids {tokens.min()}..{tokens.max()}: must be in 0..{s.vocab_size - 1}"
            )
        if image_index.max() >= views * s.tokens_per_tile:
            raise ValueError(
                f"image_index {image_index.max()}: must be < {views} views x "
                f"{s.tokens_per_tile} tokens"
            )
        if self._newline is None and (image_index == NEWLINE).any():
            raise ValueError("image_index -2: this model has no newline vector")
