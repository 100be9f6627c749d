"""Lines of text no wider than a limit: at spaces, and between Chinese and Japanese characters.

The two rules of kinsoku that every typesetter keeps: closing punctuation, small kana and the long
vowel mark do not start a line, opening brackets do not end one (JIS X 4051; JLREQ sec. 3.1.7 and
3.1.8). Thai, Lao, Khmer and Burmese put no space between words, and finding their words takes a
dictionary; their lines break at spaces, that is between phrases.
"""

# ruff: noqa: RUF001
from __future__ import annotations

import unicodedata
from collections.abc import Callable

from bluelm_jax.data.rendering import scripts

NO_START = frozenset(
    "、。，．・：；？！゛゜ヽヾゝゞ々ー）］｝〕〉》」』】〙〗〟’”»"
    "ぁぃぅぇぉっゃゅょゎァィゥェォッャュョヮヵヶ!%),.:;?]}¢°′″℃％…‥～〜"
)
NO_END = frozenset("（［｛〔〈《「『【〘〖〝‘“«([{$£¥￥")


def break_allowed(before: str, after: str) -> bool:
    """Whether a line may end between two neighbouring characters that no space separates."""
    if before in NO_END or after in NO_START or _continues(after):
        return False
    return scripts.is_wide(before) or scripts.is_wide(after)


def _continues(char: str) -> bool:
    """Marks and joiners stand on the character before them."""
    return unicodedata.category(char)[0] == "M" or char in "\u200c\u200d"


def pieces(text: str) -> list[str]:
    """Splits text where a line may end; every piece keeps the space that follows it, if any."""
    found: list[str] = []
    for word in text.split():
        start = 0
        for at in range(1, len(word)):
            if break_allowed(word[at - 1], word[at]):
                found.append(word[start:at])
                start = at
        found.append(word[start:] + " ")
    if found:
        found[-1] = found[-1].rstrip(" ")
    return found


def clusters(text: str) -> list[str]:
    """Splits text into characters with the marks that stand on them."""
    found: list[str] = []
    for char in text:
        joined = bool(found) and (_continues(char) or found[-1][-1] == "\u200d")
        if joined:
            found[-1] += char
        else:
            found.append(char)
    return found


def wrap(text: str, limit: float, measure: Callable[[str], float]) -> list[str]:
    """Fills lines greedily.

    Args:
      text: one paragraph.
      limit: widest line, in the units of `measure`.
      measure: width of a string; lines are measured as the sum of their pieces.

    Returns:
      Lines without spaces at their ends; joined by a space where a space was, they are the
      paragraph again. A single piece wider than the limit is broken between characters, and a
      character wider than it has its own line.
    """
    lines: list[str] = []
    line, width = "", 0.0
    for piece in _small_pieces(text, limit, measure):
        bare = measure(piece.rstrip(" "))
        if line and width + bare > limit:
            lines.append(line.rstrip(" "))
            line, width = "", 0.0
        line += piece
        width += measure(piece) if piece.endswith(" ") else bare
    return [*lines, line.rstrip(" ")] if line else lines


def _small_pieces(text: str, limit: float, measure: Callable[[str], float]) -> list[str]:
    """Pieces of `text`; those wider than the limit by their characters."""
    found: list[str] = []
    for piece in pieces(text):
        if measure(piece.rstrip(" ")) <= limit:
            found.append(piece)
            continue
        parts = clusters(piece.rstrip(" "))
        parts[-1] += " " * piece.endswith(" ")
        found += parts
    return found


def widest_piece(text: str, measure: Callable[[str], float]) -> float:
    """Width of the widest part that has no place to break, 0 for no text."""
    return max((measure(piece.rstrip(" ")) for piece in pieces(text)), default=0.0)
