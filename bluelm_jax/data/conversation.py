"""Conversation templates as data, and records as lists of segments.

A template says which text stands around the turns. Rendering a record gives `Segment`s: template
text, content, images, and the end of a turn, each marked as supervised or not. Token ids are made
from segments one at a time, so which token belongs to which part is known and never searched for.

A new template is one entry of `TEMPLATES`. In its strings `{text}` is the content and `{bos}` and
`{eos}` are the tokenizer's own tokens; a token of `special_tokens` written out becomes its id.

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
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from bluelm_jax.data.sources import InvalidRecordError

IMAGE = "<image>"
HUMAN, ASSISTANT, SYSTEM = "human", "assistant", "system"
_SPEAKERS = {"human": HUMAN, "user": HUMAN, "gpt": ASSISTANT, "assistant": ASSISTANT}
_SPEAKERS["system"] = SYSTEM


@dataclasses.dataclass(frozen=True, kw_only=True)
class Template:
    """The text around the turns of a conversation.

    Attributes:
      name: key in `TEMPLATES`.
      start: opens every sample.
      system: around a system message; None if the template has no place for one.
      user: around a human turn.
      assistant: marker after which the model answers; a prompt ends with it.
      answer: around the text of an answer; supervised as a whole.
      end_of_turn: token after an answer; supervised, so generation learns to stop.
      after_turn: between an answer's end and the next turn; not supervised.
      special_tokens: tokens written in the strings above that must be single ids.
      keep_user_text: False drops the text of human turns.
    """

    name: str
    start: str = "{bos}"
    system: str | None = None
    user: str
    assistant: str
    answer: str = "{text}"
    end_of_turn: str = "{eos}"
    after_turn: str = ""
    special_tokens: tuple[str, ...] = ()
    keep_user_text: bool = True


_LLAMA3_HEADER = "<|start_header_id|>{}<|end_header_id|>\n\n"

TEMPLATES: dict[str, Template] = {
    template.name: template
    for template in (
        Template(name="bluelm", user="[|Human|]:{text}", assistant="[|AI|]:"),
        Template(name="minicpm", user="<用户>{text}", assistant="<AI>"),
        # Caption pre-training as in LLaVA's first stage: image, then caption.
        Template(name="plain", user="{text}", assistant="", keep_user_text=False),
        # The original opens with a sentence about the speakers; set it as the system message.
        Template(
            name="vicuna",
            system="{text} ",
            user="USER: {text} ",
            assistant="ASSISTANT:",
            answer=" {text}",
        ),
        Template(
            name="chatml",
            start="",
            system="<|im_start|>system\n{text}<|im_end|>\n",
            user="<|im_start|>user\n{text}<|im_end|>\n",
            assistant="<|im_start|>assistant\n",
            end_of_turn="<|im_end|>",
            after_turn="\n",
            special_tokens=("<|im_start|>", "<|im_end|>"),
        ),
        Template(
            name="llama3",
            start="<|begin_of_text|>",
            system=_LLAMA3_HEADER.format("system") + "{text}<|eot_id|>",
            user=_LLAMA3_HEADER.format("user") + "{text}<|eot_id|>",
            assistant=_LLAMA3_HEADER.format("assistant"),
            end_of_turn="<|eot_id|>",
            special_tokens=(
                "<|begin_of_text|>",
                "<|start_header_id|>",
                "<|end_header_id|>",
                "<|eot_id|>",
            ),
        ),
    )
}


def get_template(name: str) -> Template:
    """The template called `name`; ValueError lists the known names."""
    if name not in TEMPLATES:
        raise ValueError(f"template {name!r} is unknown; known: {', '.join(sorted(TEMPLATES))}")
    return TEMPLATES[name]


def check_tokens(template: Template, tokenizer, extra: Sequence[str] = ()) -> None:
    """Raises ValueError for the first token that `template` needs and `tokenizer` lacks.

    Args:
      template: the template.
      tokenizer: a `bluelm_jax.data.tokenizer.Tokenizer`.
      extra: further tokens that are needed, the tags of an image layout.
    """
    text = "".join(v for v in dataclasses.asdict(template).values() if isinstance(v, str))
    for role in ("bos", "eos"):
        if "{" + role + "}" in text and getattr(tokenizer, f"{role}_id") is None:
            raise ValueError(
                f"template {template.name!r} needs a {role} token and the tokenizer has none"
            )
    for owner, tokens in (
        (f"template {template.name!r}", template.special_tokens),
        ("the image layout", extra),
    ):
        for token in tokens:
            if single_id(tokenizer, token) is None:
                raise ValueError(f"{owner} needs the token {token!r}, which the tokenizer lacks")
    if end_of_turn_id(template, tokenizer) is None:
        raise ValueError(
            f"template {template.name!r} ends a turn with {template.end_of_turn!r}, which is not "
            "a single token"
        )


def end_of_turn_id(template: Template, tokenizer) -> int | None:
    """Id that ends an answer, where generation stops; None if it is not a single token."""
    if template.end_of_turn == "{eos}":
        return tokenizer.eos_id
    return single_id(tokenizer, template.end_of_turn)


def single_id(tokenizer, token: str) -> int | None:
    """Id of `token`, by name or because its text encodes to one id; else None."""
    found = tokenizer.token_id(token)
    if found is None:
        ids = tokenizer.encode_template(token)
        found = ids[0] if len(ids) == 1 else None
    return found


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
    raw = record.get("conversations")
    if not isinstance(raw, list) or not raw:
        raise InvalidRecordError(f"{name}: 'conversations' must be a list of turns, got {raw!r}")
    turns: list[Turn] = []
    for i, entry in enumerate(raw):
        who = entry.get("from") if isinstance(entry, dict) else None
        text = entry.get("value") if isinstance(entry, dict) else None
        if not isinstance(who, str) or who not in _SPEAKERS or not isinstance(text, str):
            known = ", ".join(_SPEAKERS)
            raise InvalidRecordError(
                f"{name}: turn {i} must have 'from' (one of {known}) and a string 'value', "
                f"got {entry!r}"[:300]
            )
        turns.append(Turn(_SPEAKERS[who], text.strip()))
    system = turns[:1] if turns[0].speaker == SYSTEM else []
    rest = turns[len(system) :]
    if any(turn.speaker == SYSTEM for turn in rest):
        raise InvalidRecordError(f"{name}: a system message is not the first turn")
    if (first := next((i for i, turn in enumerate(rest) if turn.speaker == HUMAN), None)) is None:
        raise InvalidRecordError(f"{name}: no human turn among {len(rest)} turns")
    return system + rest[first:], first


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
            raise InvalidRecordError(f"template {template.name!r} has no place for system text")
        return _pieces(template.system, _content(turn.text))
    if turn.speaker == HUMAN:
        content = _content(turn.text)
        if not template.keep_user_text:
            content = [segment for segment in content if segment.kind == "image"]
        return _pieces(template.user, content)
    answer = _pieces(template.answer, _content(turn.text)) + _pieces(template.end_of_turn, [])
    if turn.text.replace(IMAGE, "").strip():
        answer = [dataclasses.replace(s, supervised=s.kind != "image") for s in answer]
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
    for part in re.split(r"(\{text\}|\{bos\}|\{eos\})", pattern):
        if part == "{text}":
            segments += content
        elif part == "{bos}":
            segments.append(Segment("bos"))
        elif part == "{eos}":
            segments.append(Segment("eos"))
        else:
            segments.append(Segment("template", part))
    return segments


def _without_empty(segments: list[Segment]) -> list[Segment]:
    return [s for s in segments if s.text or s.kind not in ("template", "content")]
