"""Text to draw: the package's own sentences, or a user's files; and the questions about it."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.resources
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

from bluelm_jax.data.rendering import line_breaking, scripts
from bluelm_jax.data.rendering.sampling import Drops

TEXT_SUFFIXES = (".txt", ".md", ".markdown", ".jsonl")
_ASSETS = importlib.resources.files("bluelm_jax") / "data" / "assets"


@dataclasses.dataclass(frozen=True)
class Passage:
    """Lines of one language that belong together.

    Attributes:
      name: where it comes from, for messages.
      language: BCP 47 code, `und` where unknown.
      lines: cleaned paragraphs or sentences, none empty.
    """

    name: str
    language: str
    lines: tuple[str, ...]


@functools.cache
def builtin() -> tuple[Passage, ...]:
    """The package's own sentences, one passage a language, in alphabetical order of the codes."""
    folder = _ASSETS / "sentences"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return tuple(
        Passage(
            file.name.removesuffix(".txt"),
            file.name.removesuffix(".txt"),
            tuple(scripts.clean(file.read_text(encoding="utf-8")).split("\n")[:-1]),
        )
        for file in files
        if file.name.endswith(".txt")
    )


@functools.cache
def _instructions() -> dict[str, dict[str, list[str]]]:
    return json.loads((_ASSETS / "instructions.json").read_text(encoding="utf-8"))


def instructions(task: str, language: str) -> list[str]:
    """Questions of a task in a language, in English where there is none in it.

    Args:
      task: `text`, `formulas`, `table`, `markdown` or `pdf`.
      language: code with or without region; `und` is asked about in English.
    """
    by_language = _instructions()[task]
    return by_language.get(language.lower().split("-")[0]) or by_language["en"]


def input_files(paths: Sequence[str], suffixes: Sequence[str]) -> list[pathlib.Path]:
    """Files named, and in folders named those with one of the suffixes, in the order of names.

    Raises:
      ValueError: if a path does not exist or no file is left.
    """
    files: list[pathlib.Path] = []
    for name in paths:
        path = pathlib.Path(name)
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.suffix.lower() in suffixes and p.is_file())
            files += sorted(inside)
        elif path.is_file():
            files.append(path)
        else:
            raise ValueError(f"input {name}: no such file or folder")
    if not files:
        raise ValueError(f"input {list(paths)}: no file with a suffix of {list(suffixes)}")
    return files


def load(
    paths: Sequence[str], drops: Drops, *, language: str = "", max_chars: int = 400
) -> tuple[Passage, ...]:
    """Reads passages from UTF-8 text, Markdown and JSONL.

    A text file is a passage for every run of lines without an empty line between; a JSONL line is
    a passage, `{"text": ..., "language": ...}`, the language optional. Lines longer than
    `max_chars` are split where a line may break. What cannot be read is counted in `drops`.

    Args:
      paths: files and folders.
      drops: gains files that are not UTF-8 and JSONL lines without a text.
      language: code for passages that state none; guessed from the script by default.
      max_chars: longest line kept whole, in characters.

    Raises:
      ValueError: if no text is left.
    """
    passages: list[Passage] = []
    for path in input_files(paths, TEXT_SUFFIXES):
        for name, text, stated in read_texts(path, drops):
            lines: list[str] = []
            for line in scripts.clean(text).split("\n"):
                lines += line_breaking.wrap(line, max_chars, len) if line.strip() else []
            if lines:
                code = stated or language or scripts.language_of("".join(lines))
                passages.append(Passage(name, code, tuple(lines)))
    if not passages:
        raise ValueError(f"input {list(paths)}: no text in it; {drops.summary()}")
    return tuple(passages)


def read_texts(path: pathlib.Path, drops: Drops) -> Iterator[tuple[str, str, str]]:
    """Yields (name, text, language or '') for every passage of a file."""
    for name, text, language in read_documents(path, drops):
        if path.suffix.lower() == ".jsonl":
            yield name, text, language
            continue
        for number, passage in enumerate(re.split(r"\n[ \t]*\n", text), start=1):
            yield f"{name}, passage {number}", passage, language


def read_documents(path: pathlib.Path, drops: Drops) -> Iterator[tuple[str, str, str]]:
    """Yields (name, text, language or '') for a whole file, or each line of a JSONL file."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        drops.add("unreadable input file", f"{path.name}: {error}")
        return
    if path.suffix.lower() != ".jsonl":
        yield path.name, content, ""
        return
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        name = f"{path.name}:{number}"
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        text = record.get("text") if isinstance(record, dict) else None
        if not isinstance(record, dict) or not isinstance(text, str):
            drops.add('input line that is no JSON object with a "text"', name)
            continue
        stated = record.get("language")
        yield name, text, stated if isinstance(stated, str) else ""


def alphabet(passages: Iterable[Passage]) -> set[str]:
    """Every character of the passages."""
    return set().union(*(set(line) for passage in passages for line in passage.lines))


def digest(passages: Iterable[Passage]) -> str:
    """Changes with the text or its languages."""
    sha = hashlib.sha256()
    for passage in passages:
        sha.update(json.dumps([passage.language, passage.lines]).encode())
    return sha.hexdigest()[:16]
