"""What is odd in the text of a record; nothing here decides whether a run uses the sample."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bluelm_jax.data.conversation import ASSISTANT, HUMAN, IMAGE, SPEAKERS, SYSTEM
from bluelm_jax.data.templates import Template
from bluelm_jax.data.tokenizer import Tokenizer

_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_REPLACEMENT = "\ufffd"
_LEAST_MARKER = 3  # Characters; a shorter marker of a template is found in any text.


class Odd(NamedTuple):
    """A kind of `findings.KINDS`, where in the record, and what exactly."""

    kind: str
    place: str
    detail: str


def marker_pattern(template: Template, tokenizer: Tokenizer) -> re.Pattern[str]:
    """Finds what stands for a token or a marker of `template` when a sample's text spells it."""
    pieces = [*template.special_tokens]
    for pattern in (template.user, template.assistant):
        pieces += re.split(r"\{\w+\}", pattern)
    for token in (tokenizer.bos_id, tokenizer.eos_id):
        pieces += [] if token is None else [tokenizer.token_text(token)]
    markers = {piece.strip() for piece in pieces if len(piece.strip()) >= _LEAST_MARKER}
    longest_first = sorted(markers, key=lambda marker: (-len(marker), marker))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def check_text(record: Mapping[str, Any], markers: re.Pattern[str]) -> Iterator[Odd]:
    """Odd ids and turns of a record whose entries may be of any type."""
    if "id" not in record:
        yield Odd("no_id", "", "")
    elif isinstance(record["id"], bool) or not isinstance(record["id"], str | int | float):
        yield Odd("bad_id", "id", f"a {type(record['id']).__name__}")
    entries = record.get("conversations")
    entries = entries if isinstance(entries, list) else []
    turns = [
        (i, SPEAKERS[entry["from"]], entry["value"])
        for i, entry in enumerate(entries)
        if _is_turn(entry)
    ]
    if len(turns) == len(entries):
        yield from _check_order(turns)
    for i, speaker, text in turns:
        yield from _check_turn(f"turn {i}", speaker, text, markers)


def _is_turn(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    who = entry.get("from")
    return isinstance(who, str) and who in SPEAKERS and isinstance(entry.get("value"), str)


def _check_order(turns: Sequence[tuple[int, str, str]]) -> Iterator[Odd]:
    spoken = [(i, speaker) for i, speaker, _ in turns if speaker != SYSTEM]
    if spoken and spoken[0][1] == ASSISTANT:
        yield Odd("leading_assistant_turn", f"turn {spoken[0][0]}", "")
    if spoken and spoken[-1][1] == HUMAN:
        yield Odd("unanswered_turn", f"turn {spoken[-1][0]}", "")
    for (_, before), (i, speaker) in itertools.pairwise(spoken):
        if before == speaker:
            yield Odd("repeated_speaker", f"turn {i}", f"{speaker} again")


def _check_turn(place: str, speaker: str, text: str, markers: re.Pattern[str]) -> Iterator[Odd]:
    if speaker == ASSISTANT and not text:
        yield Odd("empty_answer", place, "")
    elif speaker == ASSISTANT and not text.strip():
        yield Odd("blank_answer", place, f"{len(text)} characters of white space")
    elif speaker == HUMAN and not text.strip():
        yield Odd("empty_question", place, "")
    if found := markers.search(text.replace(IMAGE, "")):
        yield Odd("special_token_in_text", place, repr(found.group()))
    if found := _CONTROL.search(text):
        yield Odd("control_character", place, f"U+{ord(found.group()):04X} at {found.start()}")
    if _REPLACEMENT in text:
        yield Odd("replacement_character", place, f"{text.count(_REPLACEMENT)} times")


def surrogates(record: Mapping[str, Any]) -> Iterator[Odd]:
    """The turns that hold half of a surrogate pair."""
    for i, entry in enumerate(record["conversations"]):
        if found := _SURROGATE.search(entry["value"]):
            code = f"U+{ord(found.group()):04X} at character {found.start()}"
            yield Odd("lone_surrogate", f"turn {i}", code)
