"""Our conversation templates in Jinja, as tokenizer_config.json has them for other programs."""

from __future__ import annotations

import json
import re

from bluelm_jax.data.templates import Template

_VALUES = {"{bos}": "bos_token", "{eos}": "eos_token"}
_CONTENT = "message['content'] | trim"


def jinja(template: Template, system: str = "") -> str | None:
    """The text of a conversation by `template`, as `apply_chat_template` renders it.

    Args:
      system: system message of conversations that bring none.

    Returns:
      None for a template that leaves out what the user says: no chat looks like that.
    """
    if not template.keep_user_text:
        return None
    first = ""
    if system and template.system is not None:
        shown = _text(template.system, _literal(system))
        first = "{% if not messages or messages[0]['role'] != 'system' %}" + shown + "{% endif %}"
    refusal = _literal(f"template {template.name} has no place for system text")
    told = "{{ raise_exception(" + refusal + ") }}"
    if template.system is not None:
        told = _text(template.system, _CONTENT)
    answer = _text(template.assistant) + _text(template.answer, _CONTENT)
    answer += _text(template.end_of_turn) + _text(template.after_turn)
    return "".join(
        (
            _text(template.start), first,
            "{% for message in messages %}",
            "{% if message['role'] == 'system' %}", told,
            "{% elif message['role'] == 'user' %}", _text(template.user, _CONTENT),
            "{% else %}", answer, "{% endif %}{% endfor %}",
            "{% if add_generation_prompt %}", _text(template.assistant), "{% endif %}",
        )
    )  # fmt: skip


def _text(pattern: str, content: str = "''") -> str:
    """A template's string as Jinja; `content` is the expression in the place of {text}."""
    pieces = re.split(r"(\{bos\}|\{eos\}|\{text\})", pattern)
    values = {**_VALUES, "{text}": content}
    shown = (values.get(piece) or _literal(piece) for piece in pieces if piece)
    return "".join("{{ " + value + " }}" for value in shown)


def _literal(text: str) -> str:
    # JSON's escapes are Jinja's; other characters stay readable.
    return json.dumps(text, ensure_ascii=False)
