"""Tokenizer of a SentencePiece `.model` file, as Llama's and MiniCPM's checkpoints have."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence

import numpy as np

_MARK = re.compile(r"<\|.+\|>|\[\|.+\|\]")


class SentencePieceTokenizer:
    """A SentencePiece `.model` file; needs the optional `sentencepiece` package.

    Control symbols (`<s>`, `</s>`) and marks (`<|im_end|>`, which models have as user-defined
    symbols) written in template text become their ids, written in content they do not. SentencePiece
    puts a space before what it encodes; pieces of a turn are encoded after a newline that is taken
    off.
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
        pieces = map(self._model.id_to_piece, ids)
        marks = sorted((p for p in pieces if _MARK.fullmatch(p)), key=len, reverse=True)
        self._marks = re.compile("|".join(map(re.escape, marks)) or r"(?!)")

    def encode(self, text: str) -> list[int]:
        """Ids of content text; control symbols and marks written in it stay plain text."""
        ids, start = [], 0
        for mark in self._marks.finditer(text):  # SentencePiece finds no mark cut in two.
            ids += self._encode(text[start : mark.start() + 1])
            start = mark.start() + 1
        return ids + self._encode(text[start:])

    def _encode(self, text: str) -> list[int]:
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
            return self._encode(text)
        at, name = min(found)
        rest = self.encode_template(text[at + len(name) :])
        return [*self._encode(text[:at]), self._control[name], *rest]

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
