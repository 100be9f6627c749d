"""Writing small files so that a kill leaves the old one or the new one, never half of either."""

from __future__ import annotations

from pathlib import Path


def write_text(path: str | Path, text: str) -> None:
    """Writes UTF-8 text beside `path` and moves it there."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
