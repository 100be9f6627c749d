"""A model folder's tokenizer and conversation template, as the data config names them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bluelm_jax import data_config
from bluelm_jax.data import templates
from bluelm_jax.data import tokenizer as tokenizers
from bluelm_jax.weights.plan import WeightsError

# What a chat template in Jinja contains, and which of ours it is; the first that fits.
_MARKS = (
    ("<|im_start|>", "chatml"),
    ("<|start_header_id|>", "llama3"),
    ("<用户>", "minicpm"),
    ("[|Human|]", "bluelm"),
    ("ASSISTANT:", "vicuna"),
)
_OF_MODEL = {"minicpm": "minicpm", "bluelm": "bluelm"}
# Our own keys, in the tokenizer_config.json of models that we wrote.
TEMPLATE_KEY, SYSTEM_KEY = "bluelm_jax_template", "bluelm_jax_system"
JSON_FILE, SENTENCEPIECE_FILE = "tokenizer.json", "tokenizer.model"
CONFIG_FILE = "tokenizer_config.json"


@dataclasses.dataclass(frozen=True)
class Found:
    """What a folder says about text.

    Attributes:
      choice: its tokenizer, under the bare name of the file; None if it has none.
      path: that file.
      template: name of our template; None if the folder's fits none.
      system: system message of every conversation, as our own export names it; '' for none.
    """

    choice: data_config.TokenizerChoice | None
    path: Path | None
    template: str | None
    system: str = ""


def find(folder: Path, model_config: Mapping[str, Any]) -> Found:
    """The tokenizer and template of a folder.

    Raises:
      WeightsError: a special token that the tokenizer lacks, a file that cannot be read, or a
        template of ours that this version does not know.
    """
    settings = _read(folder / CONFIG_FILE) | _read(folder / "special_tokens_map.json")
    template = _template(folder, settings, model_config)
    system = settings.get(SYSTEM_KEY) or ""
    if not isinstance(system, str):
        raise WeightsError(f"{folder / CONFIG_FILE}: {SYSTEM_KEY} = {system!r}: must be text")
    path = folder / JSON_FILE
    if not path.is_file():
        path = folder / SENTENCEPIECE_FILE
        if not path.is_file():
            return Found(None, None, template, system)
        return Found(data_config.SentencePieceFile(path=path.name), path, template, system)
    names = {role: _token(settings, role) for role in ("bos", "eos", "pad")}
    for role in ("bos", "eos"):
        names[role] = names[role] or _by_id(path, model_config.get(f"{role}_token_id"))
    choice = data_config.TokenizerFile(path=str(path), **names)
    try:
        tokenizers.load(choice)
    except Exception as e:  # The reader's errors have no narrower class.
        raise WeightsError(f"{path}: {e}") from e
    return Found(dataclasses.replace(choice, path=path.name), path, template, system)


def check_fits(found: Found, template: str, vocab_size: int) -> None:
    """Raises WeightsError if the tokenizer has more ids than the model, or lacks a template's."""
    if found.choice is None or found.path is None:
        return
    made = tokenizers.load(dataclasses.replace(found.choice, path=str(found.path)))
    if made.vocab_size > vocab_size:
        raise WeightsError(
            f"{found.path} has {made.vocab_size} ids, the model's vocabulary {vocab_size}"
        )
    try:
        templates.check_tokens(templates.get_template(template), made)
    except ValueError as e:
        raise WeightsError(f"{found.path}: {e}; choose another template") from e


def _template(folder: Path, settings: Mapping, model_config: Mapping[str, Any]) -> str | None:
    named = settings.get(TEMPLATE_KEY)
    if named is not None:
        try:
            return templates.get_template(str(named)).name
        except ValueError as e:
            raise WeightsError(f"{folder / CONFIG_FILE}: {TEMPLATE_KEY}: {e}") from e
    texts = [str(settings.get("chat_template") or "")]
    jinja = folder / "chat_template.jinja"
    texts += [jinja.read_text(encoding="utf-8")] if jinja.is_file() else []
    for mark, name in _MARKS:
        if any(mark in text for text in texts):
            return name
    return _OF_MODEL.get(str(model_config.get("model_type", "")).lower())


def _token(settings: Mapping, role: str) -> str | None:
    """A special token, which the files write as a string or as an object with "content"."""
    value = settings.get(f"{role}_token")
    value = value.get("content") if isinstance(value, Mapping) else value
    return value if isinstance(value, str) else None


def _by_id(path: Path, token_id: Any) -> str | None:
    token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
    if not isinstance(token_id, int):
        return None
    plain = tokenizers.load(data_config.TokenizerFile(path=str(path), bos=None, eos=None))
    text = plain.token_text(token_id)
    return text if plain.token_id(text) == token_id else None


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise WeightsError(f"{path}: cannot be read as JSON: {e}") from e
    return value if isinstance(value, dict) else {}
