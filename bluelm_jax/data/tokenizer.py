"""Tokenizers behind one small interface: text to ids, ids to text, and tokens by name.

Text comes in two kinds. *Template* text may hold special tokens written out (`<|im_end|>`), which
become their single ids. *Content* (what users and data sets wrote) never does: a question that
happens to contain `</s>` is encoded as those four characters.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from bluelm_jax import data_config
from bluelm_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer

_SPACES = ("\u2581", "\u0120")  # How SentencePiece and byte-level vocabularies write a space.
BYTE_SPECIALS = ("<pad>", "<s>", "</s>", "<image>")


@runtime_checkable
class Tokenizer(Protocol):
    """What the data code needs of a tokenizer.

    Attributes:
      pad_id: id at padded and image positions; never supervised.
      bos_id: id that opens a sequence, or None.
      eos_id: id that ends a turn, or None.
      vocab_size: ids run below this.
    """

    @property
    def pad_id(self) -> int: ...  # noqa: D102
    @property
    def bos_id(self) -> int | None: ...  # noqa: D102
    @property
    def eos_id(self) -> int | None: ...  # noqa: D102
    @property
    def vocab_size(self) -> int: ...  # noqa: D102

    def encode(self, text: str) -> list[int]:
        """Ids of content text; special tokens written in it stay plain text."""
        ...

    def encode_template(self, text: str) -> list[int]:
        """Ids of template text; special tokens written in it become their ids."""
        ...

    def token_id(self, token: str) -> int | None:
        """Id of `token` if the vocabulary holds it as a single token, else None."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`, special tokens left out."""
        ...

    def token_text(self, token: int | np.integer) -> str:
        """How one id reads, special tokens included; for display."""
        ...


class ByteTokenizer:
    """UTF-8 bytes and a few special tokens; needs no file.

    Ids 0..3 are <pad>, <s>, </s> and <image>, ids 4..259 the bytes, and `extra_special_tokens`
    follow from 260, so adding one does not move any other id.
    """

    pad_id, bos_id, eos_id = 0, 1, 2

    def __init__(self, extra_special_tokens: Sequence[str] = ()):
        first_byte = len(BYTE_SPECIALS)
        self._offset = first_byte
        self._special = {name: i for i, name in enumerate(BYTE_SPECIALS)}
        for i, name in enumerate(extra_special_tokens):
            if not name or name in self._special:
                raise ValueError(f"extra special token {name!r}: must be new and not empty")
            self._special[name] = first_byte + 256 + i
        self._names = {i: name for name, i in self._special.items()}
        self.vocab_size = first_byte + 256 + len(extra_special_tokens)

    def encode(self, text: str) -> list[int]:
        """Ids of the UTF-8 bytes of `text`."""
        return [byte + self._offset for byte in text.encode("utf-8")]

    def encode_template(self, text: str) -> list[int]:
        """Ids of `text`, with special tokens recognised, the longest name first."""
        ids: list[int] = []
        names = sorted(self._special, key=len, reverse=True)
        while text:
            name = next((n for n in names if text.startswith(n)), None)
            if name is None:
                ids += self.encode(text[0])
                text = text[1:]
            else:
                ids.append(self._special[name])
                text = text[len(name) :]
        return ids

    def token_id(self, token: str) -> int | None:
        """Id of a special token, or of a character that is one byte."""
        if token in self._special:
            return self._special[token]
        ids = self.encode(token)
        return ids[0] if len(ids) == 1 else None

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of the bytes in `ids`; specials and ids past the vocabulary are left out."""
        low, high = self._offset, self._offset + 256
        data = bytes(int(i) - low for i in ids if low <= i < high)
        return data.decode("utf-8", errors="replace")

    def token_text(self, token: int | np.integer) -> str:
        """Name of a special token, the character of an ASCII byte, else `<0xHH>`."""
        if token in self._names:
            return self._names[int(token)]
        byte = int(token) - self._offset
        if not 0 <= byte < 256:
            return f"<unused {token}>"
        return chr(byte) if byte < 128 else f"<0x{byte:02X}>"


class TokenizerJson:
    """A Hugging Face `tokenizer.json`, read by the `tokenizers` package.

    Some files put a space before every text they encode ("always" prefix space). A turn is encoded
    in pieces, so that space would appear in the middle of a turn; it is detected at start-up and
    taken off again for every piece.

    Args:
      path: the file.
      bos: name of the token that opens a sequence; None for no such token.
      eos: name of the token that ends a turn; None for no such token.
      pad: name of the padding token; None takes eos, then id 0.

    Raises:
      ValueError: if a named token is not in the vocabulary, naming it and the file.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        *,
        bos: str | None = "<s>",
        eos: str | None = "</s>",
        pad: str | None = None,
    ):
        self._path, self._names = str(path), (bos, eos, pad)
        self._load()

    def __reduce__(self):
        # The Rust objects are rebuilt from the file in a worker process.
        path, (bos, eos, pad) = self._path, self._names
        return _rebuild_tokenizer_json, (path, bos, eos, pad)

    def _load(self):
        # A sample's few short texts are not worth threads; the workers are what runs in parallel.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        import tokenizers  # Optional at import time: the byte tokenizer needs no package.

        if not pathlib.Path(self._path).is_file():
            raise ValueError(f"{self._path}: no such tokenizer file")
        self._content = tokenizers.Tokenizer.from_file(self._path)
        self._content.encode_special_tokens = True
        self._template = tokenizers.Tokenizer.from_file(self._path)
        for each in (self._content, self._template):
            each.no_padding()
            each.no_truncation()
        # Ids may have gaps, so their number says too little.
        ids = self._template.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        bos, eos, pad = self._names
        self.bos_id = self._required("bos", bos)
        self.eos_id = self._required("eos", eos)
        pad_id = self._required("pad", pad)
        self.pad_id = pad_id if pad_id is not None else (self.eos_id or 0)
        self._guards = self._find_guards()

    def _required(self, role: str, name: str | None) -> int | None:
        if name is None:
            return None
        found = self.token_id(name)
        if found is None:
            raise ValueError(f"{self._path}: {role} token {name!r} is not in the vocabulary")
        return found

    def _find_guards(self) -> dict[str, list[int]]:
        """Texts to encode a piece behind, with their ids; none if no space has to be kept away."""
        ids = self._raw(self._content, "a")
        first = self._content.id_to_token(ids[0]) if ids else ""
        if not (first or "").startswith(_SPACES):
            return {}
        return {guard: self._raw(self._content, guard) for guard in ("\n", ":")}

    @staticmethod
    def _raw(tokenizer, text: str) -> list[int]:
        # The batch form alone can leave out each token's place in the text: a fifth of the time.
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def _encode(self, tokenizer, text: str) -> list[int]:
        if not text:
            return []
        for guard, before in self._guards.items():
            ids = self._raw(tokenizer, guard + text)
            if ids[: len(before)] == before:  # Else the guard was merged with the text.
                return ids[len(before) :]
        return self._raw(tokenizer, text)

    def encode(self, text: str) -> list[int]:
        """Ids of content text; special tokens written in it stay plain text."""
        return self._encode(self._content, text)

    def encode_template(self, text: str) -> list[int]:
        """Ids of template text; special tokens written in it become their ids."""
        return self._encode(self._template, text)

    def token_id(self, token: str) -> int | None:
        """Id of `token` in the vocabulary, added tokens included."""
        return self._template.token_to_id(token)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`, special tokens left out."""
        return self._template.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_text(self, token: int | np.integer) -> str:
        """The vocabulary's own spelling of one id."""
        found = self._template.id_to_token(int(token))
        return f"<unused {token}>" if found is None else found


def _rebuild_tokenizer_json(path, bos, eos, pad):
    return TokenizerJson(path, bos=bos, eos=eos, pad=pad)


def check_fits(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Raises ValueError if the tokenizer has ids that a model of `vocab_size` has no row for."""
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"the tokenizer has {tokenizer.vocab_size} ids, model.decoder.vocab_size = {vocab_size}"
        )


def load(choice: data_config.TokenizerChoice) -> Tokenizer:
    """The tokenizer that a config names."""
    match choice:
        case data_config.ByteTokens():
            return ByteTokenizer(choice.extra_special_tokens)
        case data_config.TokenizerFile():
            return TokenizerJson(choice.path, bos=choice.bos, eos=choice.eos, pad=choice.pad)
        case data_config.SentencePieceFile():
            return SentencePieceTokenizer(choice.path)
    raise TypeError(f"{choice!r} is not a tokenizer choice")
