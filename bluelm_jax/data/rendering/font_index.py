"""The faces installed on this machine, what each covers, and which may draw a given text.

Folders are scanned directly, so fontconfig is not needed. A face is used for a text only if its
character map covers every character, so no box of a missing glyph is ever drawn.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
import pathlib
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
from fontTools.ttLib import TTCollection, TTFont
from PIL import ImageFont

from bluelm_jax.data.rendering import character_map, scripts

SUFFIXES = (".ttf", ".otf", ".ttc", ".otc")

# Faces whose character map covers letters but whose glyphs are something else or partly blank:
# TeX's own encodings, symbols at fixed sizes, code-point boxes, pictures.
_UNSUITABLE = re.compile(
    r"^cm[a-z]+10$|^STIX(NonUni|Siz)|Last ?Resort|DejaVu \w+ Display|Emoji|Symbols|Barcode|Blank"
    r"|^D050000L|Webdings|Wingdings|Dingbats|^Noto Music|SignWriting|^opensymbol",
    re.IGNORECASE,
)
# Faces that draw the Han characters in the form of one region, by the languages they are for.
_REGION = re.compile(r"\b(JP|KR|SC|TC|HK)\b")
_REGIONS_OF = {"ja": ("JP",), "ko": ("KR",), "zh": ("SC",), "zh-hant": ("TC", "HK")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Face:
    """One face of a font file.

    Attributes:
      path: the font file.
      index: number of the face within a collection, else 0.
      family: typographic family name.
      style: e.g. `Bold Italic`.
      licence: what the file's name table says of its licence, first line, may be empty.
      version: the file's own checksum and size, to notice another release of a font.
    """

    path: str
    index: int
    family: str
    style: str
    licence: str
    version: str

    @property
    def name(self) -> str:
        """Family, style and file name, without the folder, which differs between machines."""
        return f"{self.family} {self.style} ({os.path.basename(self.path)})"

    @property
    def bold(self) -> bool:
        """Whether the style's name says bold or heavier."""
        return bool(re.search(r"bold|black|heavy", self.style, re.IGNORECASE))

    @property
    def slanted(self) -> bool:
        """Whether the style's name says italic or oblique."""
        return bool(re.search(r"italic|oblique|slanted", self.style, re.IGNORECASE))

    @property
    def mono(self) -> bool:
        """Whether the family's name says that it is monospaced."""
        return "mono" in self.family.lower()


def matplotlib_folder() -> pathlib.Path:
    """Folder of the faces that come with Matplotlib, DejaVu among them: there is always one."""
    return pathlib.Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def system_folders() -> list[pathlib.Path]:
    """Folders where systems keep fonts, those that exist, and Matplotlib's own first."""
    home = pathlib.Path.home()
    places = [
        matplotlib_folder(),
        pathlib.Path("/usr/share/fonts"),
        pathlib.Path("/usr/local/share/fonts"),
        home / ".local" / "share" / "fonts",
        home / ".fonts",
        pathlib.Path("/System/Library/Fonts"),
        pathlib.Path("/Library/Fonts"),
        home / "Library" / "Fonts",
        pathlib.Path(os.environ.get("WINDIR", "C:/Windows")) / "Fonts",
    ]
    return [place for place in places if place.is_dir()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FontIndex:
    """Faces and, for each character of an alphabet, the set of faces that cover it.

    Attributes:
      faces: sorted by file name and index, one of each name.
      covers: a bit set of face numbers for each character; a character that is not in it is
        covered by none.
      failed: files or faces that could not be read, with the reason.
    """

    faces: tuple[Face, ...]
    covers: dict[str, int]
    failed: tuple[str, ...] = ()

    def digest(self) -> str:
        """Changes with the faces found or their releases."""
        text = "\n".join(f"{face.name} {face.index} {face.version}" for face in self.faces)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def licences(self) -> dict[str, str]:
        """What each face's file says of its licence, by the faces' names."""
        return {face.name: face.licence or "none stated in the file" for face in self.faces}

    def numbers(self, text: str, language: str = scripts.UNKNOWN_LANGUAGE) -> tuple[int, ...]:
        """Numbers of the faces that cover all of `text` and suit its language."""
        bits = (1 << len(self.faces)) - 1
        for char in set(text):
            if not (char.isspace() or char in "\u200c\u200d"):
                bits &= self.covers.get(char, 0)
        return self._numbers(bits, language)

    def families(self, numbers: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """The same faces by family, families in the order of their names."""
        if numbers not in self._by_family:
            found: dict[str, list[int]] = {}
            for number in numbers:
                found.setdefault(self.faces[number].family, []).append(number)
            self._by_family[numbers] = tuple(tuple(found[name]) for name in sorted(found))
        return self._by_family[numbers]

    def uncovered(self, text: str) -> str:
        """Characters of `text` that no face covers, sorted; may be empty though no face has all."""
        chars = (char for char in set(text) if not (char.isspace() or char in "\u200c\u200d"))
        return "".join(sorted(char for char in chars if not self.covers.get(char, 0)))

    @functools.cached_property
    def _by_family(self) -> dict[tuple[int, ...], tuple[tuple[int, ...], ...]]:
        return {}

    @functools.cached_property
    def _cache(self) -> dict[tuple[int, str], tuple[int, ...]]:
        return {}

    def _numbers(self, bits: int, language: str) -> tuple[int, ...]:
        key = bits, language.lower()
        if key not in self._cache:
            self._cache[key] = tuple(
                number
                for number, face in enumerate(self.faces)
                if bits >> number & 1 and _suits(face, language.lower())
            )
        return self._cache[key]


def _suits(face: Face, language: str) -> bool:
    region = _REGION.search(face.family)
    wanted = _REGIONS_OF.get(language) or _REGIONS_OF.get(language.split("-")[0])
    return region is None or wanted is None or region[1] in wanted


def scan(
    alphabet: Iterable[str],
    folders: Sequence[str | pathlib.Path] = (),
    families: str = "",
) -> FontIndex:
    """Reads the faces under `folders`.

    Args:
      alphabet: the characters that will be asked for.
      folders: searched with their subfolders; the system's by default.
      families: regular expression that a face's family must match somewhere; all by default.

    Raises:
      ValueError: if no usable face is found, or `families` is no regular expression.
    """
    try:
        wanted = re.compile(families)
    except re.error as error:
        raise ValueError(f"families {families!r}: no regular expression: {error}") from error
    codes = {ord(char) for char in alphabet}
    found: dict[str, tuple[Face, frozenset[int]]] = {}
    failed: list[str] = []
    for path in _font_files(folders or system_folders()):
        try:
            for face, covered in _read(path, codes, wanted):
                # A font installed twice counts once: the first folder's copy.
                found.setdefault(f"{face.name} {face.index}", (face, covered))
        except Exception as error:  # fontTools raises errors of many kinds on damaged files
            failed.append(f"{path.name}: {type(error).__name__}: {error}"[:200])
    if not found:
        places = ", ".join(map(str, folders or system_folders()))
        raise ValueError(f"no usable face of family {families!r} in {places}; failed: {failed}")
    entries = [found[name] for name in sorted(found)]
    covers: dict[str, int] = {}
    for number, (_, covered) in enumerate(entries):
        for code in covered:
            covers[chr(code)] = covers.get(chr(code), 0) | 1 << number
    return FontIndex(faces=tuple(face for face, _ in entries), covers=covers, failed=tuple(failed))


def _font_files(folders: Sequence[str | pathlib.Path]) -> list[pathlib.Path]:
    files: list[pathlib.Path] = []
    for folder in folders:
        if not pathlib.Path(folder).is_dir():
            raise ValueError(f"font folder {folder}: no such folder")
        paths = pathlib.Path(folder).rglob("*")
        files += sorted(path for path in paths if path.suffix.lower() in SUFFIXES)
    return files


def _read(
    path: pathlib.Path, codes: set[int], wanted: re.Pattern[str]
) -> list[tuple[Face, frozenset[int]]]:
    """The file's usable faces with the part of `codes` that each covers."""
    with path.open("rb") as stream:
        if path.suffix.lower() in (".ttc", ".otc"):
            fonts = TTCollection(stream, lazy=True).fonts
        else:
            fonts = [TTFont(stream, lazy=True)]
        fonts = _read_faces(path, fonts, codes, wanted)
    for face, _ in fonts:
        ImageFont.truetype(face.path, 16, index=face.index)  # FreeType has to like it too
    return fonts


def _read_faces(
    path: pathlib.Path, fonts: Sequence[TTFont], codes: set[int], wanted: re.Pattern[str]
) -> list[tuple[Face, frozenset[int]]]:
    # The faces of a collection mostly share one character map, which takes longest to read.
    maps: dict[int, frozenset[int]] = {}
    found = []
    for index, font in enumerate(fonts):
        face = _face(path, index, font)
        if not wanted.search(face.family) or _UNSUITABLE.search(face.family):
            continue
        reader: Any = font.reader
        place = reader.tables["cmap"].offset
        if place not in maps:
            maps[place] = character_map.covered(font, codes)
        found.append((face, maps[place]))
    return found


def _face(path: pathlib.Path, index: int, font: TTFont) -> Face:
    names = font["name"]

    def text(*identities: int) -> str:
        found = (names.getDebugName(identity) for identity in identities)
        return next((name.strip() for name in found if name and name.strip()), "")

    # Read raw: decoding the table logs a remark on every font with an odd date.
    reader: Any = font.reader
    (checksum,) = struct.unpack_from(">I", reader["head"], 8)
    licence = text(13) or text(14)
    return Face(
        path=str(path),
        index=index,
        family=text(16, 1) or path.stem,
        style=text(17, 2) or "Regular",
        licence=licence.splitlines()[0][:160] if licence else "",
        version=f"{checksum:08x}-{path.stat().st_size}",
    )


@functools.lru_cache(maxsize=256)
def load(path: str, index: int, size: int, shaping: bool) -> ImageFont.FreeTypeFont:
    """Opens a face at a size in pixels; Raqm lays out where `shaping`, else Pillow's own layout."""
    engine = ImageFont.Layout.RAQM if shaping else ImageFont.Layout.BASIC
    return ImageFont.truetype(path, size, index=index, layout_engine=engine)
