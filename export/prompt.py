"""Question and images -> decoder prompt, from what a bundle's manifest says; no JAX needed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bluelm_jax import layout, serialize
from bluelm_jax.data import conversation, tokenizer
from bluelm_jax.data.examples import Example, ExampleMaker, Skipped
from bluelm_jax.data.plans import Planner
from bluelm_jax.data_config import (
    DataConfig,
    SentencePieceFile,
    SourceConfig,
    TokenizerChoice,
    TokenizerFile,
)
from export import bundle


def describe(data: DataConfig) -> tuple[dict[str, Any], dict[str, Path]]:
    """What a bundle keeps of a data config.

    Returns:
      The config as a plain dict, with a tokenizer file named relative to the bundle and without
      the training sources; and the files to copy, by their name in the bundle.

    Raises:
      ValueError: the layout resizes token maps.
    """
    if layout.resizes(data.layout):
        raise ValueError(f"{data.layout!r} blends image tokens, which an exported model cannot")
    choice, files = data.tokenizer, {}
    if isinstance(choice, TokenizerFile | SentencePieceFile):
        name = "tokenizer" + Path(choice.path).suffix
        files[name] = Path(choice.path)
        choice = dataclasses.replace(choice, path=name)
    policies = ("unreadable_image", "invalid_record", "overlong", "too_many_tiles")
    kept = dataclasses.replace(
        data,
        tokenizer=choice,
        sources=(SourceConfig(path="prompt"),),
        **{f"on_{policy}": "raise" for policy in policies},  # type: ignore[arg-type]
    )
    return serialize.to_plain(kept), files


def stop_id(data: DataConfig) -> int | None:
    """The token that ends an answer in the config's template."""
    return conversation.end_of_turn_id(
        conversation.get_template(data.template), tokenizer.load(data.tokenizer)
    )


class Prompter:
    """Makes prompts for one bundle.

    Args:
      directory: the bundle, for its tokenizer file.
      manifest: its manifest.

    Attributes:
      tokenizer: turns answers into text.

    Raises:
      BundleError: the bundle was written without prompt information.
    """

    def __init__(self, directory: str | Path, manifest: bundle.Manifest):
        if manifest.prompt is None:
            raise bundle.BundleError(
                f"{directory}: written without tokenizer and template, so it takes token ids only"
            )
        data = serialize.from_plain(manifest.prompt)
        data = dataclasses.replace(data, tokenizer=_located(data.tokenizer, Path(directory)))
        self.tokenizer = tokenizer.load(data.tokenizer)
        side = layout.token_side(serialize.from_plain(manifest.model))
        self._maker = ExampleMaker(Planner(data, side=side, tokenizer=self.tokenizer))

    def make(self, question: str, images: Sequence[str | Path]) -> Example:
        """The prompt of a question about images.

        Args:
          question: '<image>' marks the place of an image; images without a mark stand in front, a
            line each.
          images: paths, in order.

        Raises:
          ValueError: another number of marks than of images, an image that cannot be read, or a
            prompt too long for the model.
        """
        question = conversation.mark_images(question, len(images))
        paths = [os.path.realpath(path) for path in images]
        root = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
        record = {
            "image": [os.path.relpath(path, root) for path in paths],
            "conversations": [{"from": "human", "value": question}],
        }
        source = SourceConfig(path="prompt", image_root=root)
        example = self._maker.make_prompt(record, source, "on the command line")
        if isinstance(example, Skipped):
            raise ValueError(example.detail)
        return example


def _located(choice: TokenizerChoice, directory: Path) -> TokenizerChoice:
    if isinstance(choice, TokenizerFile | SentencePieceFile):
        return dataclasses.replace(choice, path=str(directory / choice.path))
    return choice
