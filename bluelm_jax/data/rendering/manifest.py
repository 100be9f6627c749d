"""What a rendering holds: counts, versions, fonts, and what was left out."""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Mapping
from typing import Any

from PIL import features

from bluelm_jax.data.rendering.sampling import Drops

# Raised when the same settings start to give other images.
VERSION = 1
_PACKAGES = ("bluelm-jax", "numpy", "pillow", "matplotlib", "fonttools")
_OPTIONAL = {"pdf": ("pypdfium2",), "markdown": ("markdown-it-py",)}
_LIBRARIES = ("freetype2", "raqm", "fribidi", "harfbuzz", "libjpeg_turbo")


class Tally:
    """Counts records as they are written."""

    def __init__(self, left_out: Mapping[str, Mapping[str, Any]]):
        self._drops = Drops(left_out)
        self._written = 0
        self._languages: Counter[str] = Counter()
        self._fonts: Counter[str] = Counter()
        self._suffixes: Counter[str] = Counter()

    def merge(self, left_out: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds what a shard left out."""
        self._drops.merge(left_out)

    def add(self, record: Mapping[str, Any]) -> None:
        """Counts one record."""
        self._written += 1
        self._suffixes[record["image"].rpartition(".")[2]] += 1
        self._languages[record["meta"].get("language", "none")] += 1
        self._fonts.update(record["meta"].get("fonts", ()))

    @property
    def written(self) -> int:
        """Records counted."""
        return self._written

    def why(self) -> str:
        """What was left out, in one line."""
        return self._drops.summary().replace("\n", "; ")

    def manifest(
        self, kind: str, settings: Mapping[str, Any], licences: Mapping[str, str]
    ) -> dict[str, Any]:
        """The manifest: the same for the same images, so without times, folders or machines."""
        fonts = {
            name: {"images": count, "licence": licences.get(name, "unknown")}
            for name, count in sorted(self._fonts.items())
        }
        return {
            "kind": kind,
            "version": VERSION,
            "settings": dict(settings),
            "written": self._written,
            "left_out": self._drops.to_plain(),
            "formats": dict(sorted(self._suffixes.items())),
            "languages": dict(sorted(self._languages.items())),
            "fonts": fonts,
            "software": software(kind),
        }


def software(kind: str) -> dict[str, str]:
    """Versions that the images depend on; `absent` where something is not installed."""
    found = {}
    for name in (*_PACKAGES, *_OPTIONAL.get(kind, ())):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    for name in _LIBRARIES:
        found[name] = features.version(name) or "absent"
    return found
