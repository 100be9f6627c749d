"""Token ids as text that a person can read, whatever the tokenizer's own spelling of its tokens."""

from __future__ import annotations

import dataclasses
import unicodedata
from collections.abc import Sequence

from bluelm_jax.data.tokenizer import Tokenizer

_JOINERS = "\u200c\u200d"  # Without a shape of their own, but part of scripts and emoji.
_LONGEST = 8  # Tokens that one character may take.


@dataclasses.dataclass(frozen=True)
class Token:
    """Text of one token, or of the few that only together make a character.

    `text` is as the text has it; `special` marks tokens without text, such as the end of a turn.
    """

    text: str
    ids: tuple[int, ...]
    at: int
    special: bool = False


class TokenTexts:
    """Ids as readable tokens.

    A token's text is what it adds behind another one, so that spaces which a tokenizer writes into
    its tokens stay; tokens that are parts of a character are shown as that character together.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a")[-1:]
        self._base = tokenizer.decode(self._before)

    def split(self, ids: Sequence[int], start: int) -> list[Token]:
        """Tokens of positions from `start` on."""
        tokens: list[Token] = []
        i = 0
        while i < len(ids):
            count = self._count(ids[i : i + _LONGEST])
            chosen = tuple(int(token) for token in ids[i : i + count])
            text = self._text(chosen)
            special = text == ""
            shown = "".join(map(self._tokenizer.token_text, chosen)) if special else text
            tokens.append(Token(shown, chosen, start + i, special))
            i += count
        return tokens

    def _count(self, ids: Sequence[int]) -> int:
        """How many tokens make whole characters; 1 where none do."""
        for count in range(1, len(ids) + 1):
            text = self._text(ids[:count])
            if not text or "\ufffd" not in text:
                return 1 if not text else count
        return 1

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode([*self._before, *ids]).removeprefix(self._base)


def printable(text: str) -> str:
    """`text` with control and direction characters spelt out, so that none acts on the display."""
    return "".join(
        c if c in "\n" + _JOINERS or unicodedata.category(c) not in ("Cc", "Cf", "Cs", "Cn", "Co")
        else f"\\x{ord(c):02x}" if ord(c) < 256 else f"\\u{ord(c):04x}"
        for c in text
    )  # fmt: skip
