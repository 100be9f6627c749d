"""What a text's characters ask of whoever draws it: script, direction, shaping, language."""

from __future__ import annotations

import functools
import unicodedata

import fontTools.unicodedata
from PIL import features

# Scripts whose letters stand side by side, left to right, one glyph a character. Everything else
# needs a shaping engine: letters that join, marks that move, or lines that run right to left.
_PLAIN = frozenset(
    (
        "Latn",
        "Grek",
        "Cyrl",
        "Armn",
        "Geor",
        "Hani",
        "Hira",
        "Kana",
        "Hang",
        "Bopo",
        "Ethi",
        "Cher",
        "Cans",
        "Yiii",
        "Tfng",
        "Zyyy",
        "Zinh",
    )
)
_NO_SCRIPT = frozenset(("Zyyy", "Zinh", "Zzzz"))
_WIDE = frozenset(("Hani", "Hira", "Kana", "Bopo", "Yiii"))
_JOINERS = "\u200c\u200d"

# The language that a script stands for where nothing else says which it is.
_LANGUAGE = {
    "Latn": "en",
    "Cyrl": "ru",
    "Grek": "el",
    "Arab": "ar",
    "Hebr": "he",
    "Deva": "hi",
    "Thai": "th",
    "Hang": "ko",
    "Hira": "ja",
    "Kana": "ja",
    "Hani": "zh",
    "Bopo": "zh",
}
UNKNOWN_LANGUAGE = "und"


@functools.cache
def script(char: str) -> str:
    """Returns the ISO 15924 code of a character's script, e.g. `Latn`; `Zyyy` is shared."""
    return fontTools.unicodedata.script(char)


def clean(text: str) -> str:
    """Returns composed text (NFC) without control and format characters.

    Line breaks stay, other white space becomes a space, and the two joiners, which change letters
    in Arabic and Indic scripts, stay as well. Unassigned and private characters stay: no face
    covers most of them, and the choice of a face says so.
    """
    text = unicodedata.normalize("NFC", text.replace("\r\n", "\n").replace("\r", "\n"))
    return "".join(filter(None, map(_clean_char, text)))


@functools.lru_cache(maxsize=100_000)
def _clean_char(char: str) -> str:
    if char == "\n" or char in _JOINERS:
        return char
    if char.isspace():
        return " "
    return "" if unicodedata.category(char) in ("Cc", "Cf", "Cs") else char


@functools.lru_cache(maxsize=100_000)
def _char_needs_shaping(char: str) -> bool:
    return script(char) not in _PLAIN or char in _JOINERS or unicodedata.category(char)[0] == "M"


def needs_shaping(text: str) -> bool:
    """Whether glyphs placed one after another, left to right, would misspell `text`."""
    return not text.isascii() and any(map(_char_needs_shaping, set(text)))


def direction(text: str) -> str:
    """Returns `rtl` or `ltr`, as the first letter of strong direction says (UAX 9, rule P2)."""
    for char in text:
        strong = unicodedata.bidirectional(char)
        if strong in ("R", "AL"):
            return "rtl"
        if strong == "L":
            return "ltr"
    return "ltr"


@functools.lru_cache(maxsize=100_000)
def is_wide(char: str) -> bool:
    """Whether a line may break beside `char` without a space: Chinese, Japanese, Yi."""
    return script(char) in _WIDE or (
        script(char) == "Zyyy" and unicodedata.east_asian_width(char) in ("W", "F")
    )


def main_script(text: str) -> str:
    """Returns the script of most letters; kana and hangul before Han; `Zyyy` where none has one."""
    counts: dict[str, int] = {}
    for char in text:
        code = script(char)
        if code not in _NO_SCRIPT:
            counts[code] = counts.get(code, 0) + 1
    if not counts:
        return "Zyyy"
    # A Japanese sentence may hold more Han characters than kana, a Chinese one holds no kana.
    for own in ("Hang", "Hira", "Kana"):
        if counts.get(own, 0) * 10 > counts.get("Hani", 0) > 0:
            return own
    return max(counts, key=lambda code: (counts[code], code))


def language_of(text: str) -> str:
    """Guesses a language from the script; `und` for a script that stands for none here."""
    code = main_script(text)
    return "en" if code == "Zyyy" else _LANGUAGE.get(code, UNKNOWN_LANGUAGE)


def has_raqm() -> bool:
    """Whether Pillow can shape text here: it was built with Raqm and finds FriBiDi."""
    return bool(features.check("raqm")) and bool(features.check("fribidi"))


RAQM_MISSING = (
    "Pillow has no Raqm layout here, which this script needs; its wheels load FriBiDi from the "
    "system: apt install libfribidi0 (macOS: brew install fribidi)"
)
