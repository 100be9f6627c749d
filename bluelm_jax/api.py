"""A model in a few lines; the same functions as everywhere behind it.

    import bluelm_jax

    model = bluelm_jax.load("runs/quickstart/relaxed")
    print(model.generate("page.png", "Read."))

`load` takes a run folder (trained here, or made by experiments.import_weights) or a language model's
folder in Hugging Face's layout. `model.weights` and `model.run` are what the library's functions take.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from bluelm_jax import chat as chats
from bluelm_jax import config, run_folder
from bluelm_jax.chat_session import Session as Session
from bluelm_jax.params import Tree
from bluelm_jax.run_config import RunConfig
from bluelm_jax.sampling import SamplingConfig
from bluelm_jax.weights import hf_run

ImageLike = str | os.PathLike[str] | Image.Image | np.ndarray
Images = ImageLike | Sequence[ImageLike] | None


class Model:
    """Weights with the run config that says how to use them.

    Attributes:
      run: model, data and training configs.
      weights: tree of `vlm.specs(run.model)`, or the parts of it that the checkpoint holds.
    """

    def __init__(self, run: RunConfig, weights: Tree):
        self.run, self.weights = run, weights
        self._chat = chats.Chat(weights, run)

    @property
    def config(self) -> config.VLMConfig:
        """The model's config, which the functions of `vlm` take."""
        return self.run.model

    @property
    def tokenizer(self) -> Any:
        """Text to ids and back (`bluelm_jax.data.tokenizer.Tokenizer`)."""
        return self._chat.tokenizer

    @property
    def sees_images(self) -> bool:
        """False for a language model alone."""
        return self._chat.sees_images

    def generate(self, images: Images, prompt: str, *, seed: int = 0, **sampling: Any) -> str:
        """The answer to one question.

        Args:
          images: a path, a Pillow image, an array uint8 [height, width, 3 or 4] or [height,
            width] (transparency is laid on the background colour), a sequence of these, or None.
          prompt: the question; `<image>` marks an image's place, images without a mark come first.
          seed: seed of the draws, where temperature > 0.
          **sampling: fields of `SamplingConfig`: max_new_tokens, temperature, top_k, top_p, ...

        Raises:
          ValueError: an image that cannot be read or that the model has no tower for, a prompt that
            is too long, a sampling field out of its bounds.
          TypeError: an unknown sampling field, a prompt that is no string, or something that is not
            an image.
        """
        return self.chat().ask(prompt, images, seed=seed, **sampling)

    def stream(
        self, images: Images, prompt: str, *, seed: int = 0, **sampling: Any
    ) -> Iterator[str]:
        """`generate` in pieces of text, as they come."""
        return self.chat().stream(prompt, images, seed=seed, **sampling)

    def chat(self) -> Session[Images]:
        """A new conversation."""
        return Session(self.ask)

    def ask(
        self,
        past: chats.Conversation,
        question: str,
        images: Images = None,
        *,
        seed: int = 0,
        **sampling: Any,
    ) -> chats.Answer:
        """`chat.Chat.ask`, for those who keep conversations themselves."""
        known = [field.name for field in dataclasses.fields(SamplingConfig)]
        if unknown := sampling.keys() - known:
            raise TypeError(f"unknown sampling options {sorted(unknown)}; known: {known}")
        how = SamplingConfig(**sampling)
        return self._chat.ask(past, question, _as_list(images), sampling=how, seed=seed)

    def __repr__(self) -> str:
        size = sum(x.size for x in jax.tree.leaves(self.weights))
        return f"Model({', '.join(self.weights)}; {size:,} parameters, {self.run.model.dtype})"


def _is_hf(folder: Path) -> bool:
    """Whether a folder's config.json is of Hugging Face's kind; a missing one is a run's mistake."""
    path = folder / "config.json"
    if not path.is_file():
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: {e}") from e
    return isinstance(found, dict) and "model_type" in found


def _as_list(images: Images) -> list[str | os.PathLike[str] | Image.Image]:
    """One image or several, arrays as Pillow images."""
    if images is None:
        return []
    single = isinstance(images, str | os.PathLike | Image.Image | np.ndarray)
    return [_as_image(x) for x in ([images] if single else images)]


def _as_image(image: ImageLike) -> str | os.PathLike[str] | Image.Image:
    if isinstance(image, np.ndarray):
        fits = image.dtype == np.uint8 and (image.ndim == 2 or image.shape[2:] in ((3,), (4,)))
        if not fits:
            raise TypeError(
                f"an image array of shape {image.shape}, {image.dtype}: must be uint8 "
                "[height, width, 3 or 4] or [height, width]"
            )
        return Image.fromarray(image)
    if not isinstance(image, str | os.PathLike | Image.Image):
        raise TypeError(f"an image must be a path, a Pillow image or an array, got {type(image)}")
    return image


def load(path: str | os.PathLike[str], *, dtype: config.Dtype | None = None) -> Model:
    """Loads a model to ask.

    Args:
      path: a run folder, or a language model's folder with config.json, safetensors and tokenizer
        as Hugging Face's `save_pretrained` writes them. A vision tower and a language model become a
        run folder with `python -m experiments.import_weights`.
      dtype: of the activations and of the weights as they are used; None is what the run says, and
        for a Hugging Face folder float32.

    Raises:
      ValueError: no such folder, or one that cannot be used; the message says why.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such directory")
    run, weights = hf_run.load(folder) if _is_hf(folder) else run_folder.load(folder)
    if dtype is not None:
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, dtype=dtype))
    return Model(run, weights)
