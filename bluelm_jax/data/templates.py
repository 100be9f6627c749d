"""Conversation templates as data, and the check that a tokenizer has what they need.

A template says which text stands around the turns. A new one is one entry of `TEMPLATES`. In its
strings `{text}` is the content and `{bos}` and `{eos}` are the tokenizer's own tokens; a token of
`special_tokens` written out becomes its id.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


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
