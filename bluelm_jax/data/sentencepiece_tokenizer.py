"""Tokenizer of a SentencePiece `.model` file, as Llama's and MiniCPM's checkpoints have."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np


class SentencePieceTokenizer:
    """A SentencePiece `.model` file; needs the optional `sentencepiece` package.

    Control symbols (`<s>`, `</s>`) written in template text become their ids. SentencePiece puts a
    space before what it encodes; pieces of a turn are encoded after a newline that is taken off.
    """

    def __init__(self, path: str | pathlib.Path):
        self._path = str(path)
        self._load()

    def __reduce__(self):
        return SentencePieceTokenizer, (self._path,)

    def _load(self):
        try:
            import sentencepiece  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError(
                f"{self._path}: reading a SentencePiece model needs the package `sentencepiece`"
            ) from error
        if not pathlib.Path(self._path).is_file():
            raise ValueError(f"{self._path}: no such tokenizer file")
        self._model = sentencepiece.SentencePieceProcessor(model_file=self._path)
        self.vocab_size = self._model.vocab_size()
        self.bos_id = _valid(self._model.bos_id())
        self.eos_id = _valid(self._model.eos_id())
        pad_id = _valid(self._model.pad_id())
        self.pad_id = pad_id if pad_id is not None else (self.eos_id or 0)
        self._guard = self._model.encode("\n")
        ids = range(self.vocab_size)
        self._control = {self._model.id_to_piece(i): i for i in ids if self._model.is_control(i)}

    def encode(self, text: str) -> list[int]:
        """Ids of content text; control symbols written in it stay plain text."""
        if not text:
            return []
        ids = self._model.encode("\n" + text)
        if ids[: len(self._guard)] == self._guard:
            return ids[len(self._guard) :]
        return self._model.encode(text)

    def encode_template(self, text: str) -> list[int]:
        """Ids of template text; control symbols written in it become their ids."""
        found = [(text.find(name), name) for name in self._control if name in text]
        if not found:
            return self.encode(text)
        at, name = min(found)
        rest = self.encode_template(text[at + len(name) :])
        return [*self.encode(text[:at]), self._control[name], *rest]

    def token_id(self, token: str) -> int | None:
        """Id of `token` if it is one piece of the model."""
        found = self._model.piece_to_id(token)
        return found if self._model.id_to_piece(found) == token else None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`, control symbols left out."""
        return self._model.decode([int(i) for i in ids])

    def token_text(self, token: int | np.integer) -> str:
        """The model's own spelling of one id."""
        return self._model.id_to_piece(int(token))


def _valid(token: int) -> int | None:
    return token if token >= 0 else None
