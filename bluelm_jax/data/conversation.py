"""Records as lists of segments, by a template (`templates`).

Rendering a record gives `Segment`s: template text, content, images, and the end of a turn, each
marked as supervised or not. Token ids are made from segments one at a time, so which token belongs
to which part is known and never searched for.

How a record is read:

* `<image>` anywhere in a turn, any number of times, stands for the next image of the record. Each
  keeps its place. A count that differs from the number of images is an error.
* A sample without images has no "image" key (or an empty one); keys that are not known are ignored.
* Turns before the first human turn that are not a system message are left out (and counted).
* Each turn keeps its own markers, also when one speaker has several turns in a row.
* White space at both ends of a turn is dropped.
* An assistant turn without text stays in the context; neither it nor its end is supervised.
* A template with `keep_user_text=False` (plain) keeps only the images of human turns.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bluelm_jax.data.sources import InvalidRecordError
from bluelm_jax.data.templates import TEMPLATES as TEMPLATES
from bluelm_jax.data.templates import Template as Template
from bluelm_jax.data.templates import check_tokens as check_tokens
from bluelm_jax.data.templates import end_of_turn_id as end_of_turn_id
from bluelm_jax.data.templates import get_template as get_template
from bluelm_jax.data.templates import single_id as single_id

IMAGE = "<image>"
HUMAN, ASSISTANT, SYSTEM = "human", "assistant", "system"
SPEAKERS = {"human": HUMAN, "user": HUMAN, "gpt": ASSISTANT, "assistant": ASSISTANT}
SPEAKERS["system"] = SYSTEM


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of a sample: `text` for template and content, none for images and bos / eos."""

    kind: Literal["template", "content", "image", "bos", "eos"]
    text: str = ""
    supervised: bool = False


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn: who speaks ('human', 'assistant' or 'system') and the text, stripped."""

    speaker: str
    text: str


def read_turns(record: Mapping[str, Any], name: str) -> tuple[list[Turn], int]:
    """The turns of a LLaVA record and how many leading ones were left out.

    Raises:
      InvalidRecordError: names the sample and the turn that is not understood.
    """
    turns = [_read_turn(entry, i, name) for i, entry in enumerate(_raw_turns(record, name))]
    system = turns[:1] if turns[0].speaker == SYSTEM else []
    rest = turns[len(system) :]
    late = next((i for i, turn in enumerate(rest) if turn.speaker == SYSTEM), None)
    if late is not None:
        message = f"{name}: a system message is not the first turn"
        raise InvalidRecordError(message, "late_system_turn", f"turn {late + len(system)}")
    if (first := next((i for i, turn in enumerate(rest) if turn.speaker == HUMAN), None)) is None:
        message = f"{name}: no human turn among {len(rest)} turns"
        raise InvalidRecordError(message, "no_human_turn")
    return system + rest[first:], first


def _raw_turns(record: Mapping[str, Any], name: str) -> list[Any]:
    """The entries of a record's 'conversations', at least one."""
    raw = record.get("conversations")
    if isinstance(raw, list) and raw:
        return raw
    kind = "bad_conversations"
    if raw is None:
        kind = "no_conversations"
    elif raw == []:
        kind = "empty_conversations"
    message = f"{name}: 'conversations' must be a list of turns, got {raw!r}"
    raise InvalidRecordError(message[:300], kind, "conversations")


def _read_turn(entry: Any, index: int, name: str) -> Turn:
    """Turn `index` of a record."""
    kind = ""
    if not isinstance(entry, dict):
        kind = "bad_turn"
    elif "from" not in entry or "value" not in entry:
        kind = "turn_without_key"
    elif not isinstance(entry["from"], str) or entry["from"] not in SPEAKERS:
        kind = "unknown_speaker"
    elif not isinstance(entry["value"], str):
        kind = "bad_value"
    if kind:
        known = ", ".join(SPEAKERS)
        message = (
            f"{name}: turn {index} must have 'from' (one of {known}) and a string 'value', "
            f"got {entry!r}"
        )
        raise InvalidRecordError(message[:300], kind, f"turn {index}")
    return Turn(SPEAKERS[entry["from"]], entry["value"].strip())


def mark_images(question: str, count: int) -> str:
    """`question` with `count` marks: those it lacks come in front, a line each, as LLaVA has it."""
    return f"{IMAGE}\n" * (count - question.count(IMAGE)) + question


def count_images(turns: Sequence[Turn]) -> int:
    """How many images the turns ask for."""
    return sum(turn.text.count(IMAGE) for turn in turns)


def render(turns: Sequence[Turn], template: Template, *, system: str = "") -> list[Segment]:
    """Segments of a whole conversation, answers and their ends supervised."""
    segments = _pieces(template.start, [])
    turns = _with_system(turns, system)
    for turn in turns:
        segments += _render_turn(turn, template)
    return _without_empty(segments)


def render_prompt(
    turns: Sequence[Turn], template: Template, *, system: str = "", turn: int = -1
) -> tuple[list[Segment], str]:
    """Segments up to the marker of one answer, and that answer's text.

    Args:
      turns: the conversation.
      template: its template.
      system: system message if the conversation has none.
      turn: which assistant turn is asked for, as an index among them; earlier ones are context.
        With no assistant turn at all, the prompt is everything and the answer ''.

    Raises:
      IndexError: if there are assistant turns, but not that one.
    """
    answers = [i for i, each in enumerate(turns) if each.speaker == ASSISTANT]
    end, reference = len(turns), ""
    if answers:
        end = answers[turn]
        reference = turns[end].text
    segments = render(turns[:end], template, system=system)
    segments += _pieces(template.assistant, [])
    return [dataclasses.replace(s, supervised=False) for s in _without_empty(segments)], reference


def _with_system(turns: Sequence[Turn], system: str) -> list[Turn]:
    if system and (not turns or turns[0].speaker != SYSTEM):
        return [Turn(SYSTEM, system), *turns]
    return list(turns)


def _render_turn(turn: Turn, template: Template) -> list[Segment]:
    if turn.speaker == SYSTEM:
        if template.system is None:
            message = f"template {template.name!r} has no place for system text"
            raise InvalidRecordError(message, "system_without_place", "turn 0")
        return _pieces(template.system, _content(turn.text))
    if turn.speaker == HUMAN:
        content = _content(turn.text)
        if not template.keep_user_text:
            content = [segment for segment in content if segment.kind == "image"]
        return _pieces(template.user, content)
    answer = _pieces(template.answer, _content(turn.text)) + _pieces(template.end_of_turn, [])
    if turn.text.replace(IMAGE, "").strip():
        answer = [Segment(s.kind, s.text, s.kind != "image") for s in answer]
    return _pieces(template.assistant, []) + answer + _pieces(template.after_turn, [])


def _content(text: str) -> list[Segment]:
    """Text and images of a turn, in order."""
    segments: list[Segment] = []
    for i, part in enumerate(text.split(IMAGE)):
        if i:
            segments.append(Segment("image"))
        segments.append(Segment("content", part))
    return segments


def _pieces(pattern: str, content: list[Segment]) -> list[Segment]:
    """`pattern` with its placeholders filled in."""
    segments: list[Segment] = []
    for piece in _split(pattern):
        if piece is None:
            segments += content
        else:
            segments.append(piece)
    return segments


@functools.cache
def _split(pattern: str) -> tuple[Segment | None, ...]:
    """The pieces of a template's string; None stands for the content."""
    named = {"{text}": None, "{bos}": Segment("bos"), "{eos}": Segment("eos")}
    parts = re.split(r"(\{text\}|\{bos\}|\{eos\})", pattern)
    return tuple(named[p] if p in named else Segment("template", p) for p in parts if p)


def _without_empty(segments: list[Segment]) -> list[Segment]:
    return [s for s in segments if s.text or s.kind not in ("template", "content")]
