"""Results kept between the starts of a job, each with the settings that made it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bluelm_jax.files import write_text


def save(path: Path, settings: Any, value: Any) -> None:
    """Writes `value` and what made it (both JSON-able), all or nothing."""
    text = json.dumps({"settings": settings, "value": value}, indent=1, ensure_ascii=False)
    write_text(path, text + "\n")


def load(path: Path, settings: Any) -> Any | None:
    """The value kept in `path`; None if there is none, or other settings made it."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    same = isinstance(kept, dict) and kept.get("settings") == json.loads(json.dumps(settings))
    return kept["value"] if same else None
