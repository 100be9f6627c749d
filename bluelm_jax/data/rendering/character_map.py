"""Which characters a face covers, read straight from its `cmap` table.

fontTools turns a whole table into a dictionary of glyph names, which takes seconds over the faces
of an ordinary machine; here only the asked characters are looked up, in the two formats that nearly
every font uses (OpenType specification, `cmap`, formats 4 and 12).
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from fontTools.ttLib import TTFont

# Unicode subtables (platform, encoding), the one with most characters first.
_PREFERRED = ((3, 10), (0, 6), (0, 4), (3, 1), (0, 3), (0, 2), (0, 1), (0, 0))


def covered(font: TTFont, codes: set[int]) -> frozenset[int]:
    """The part of `codes` that has a glyph; none for a font without a Unicode map."""
    reader: Any = font.reader
    data = reader["cmap"]
    (count,) = struct.unpack(">H", data[2:4])
    tables = {}
    for number in range(count):
        platform, encoding, offset = struct.unpack_from(">HHI", data, 4 + 8 * number)
        tables[platform, encoding] = offset
    best = next((tables[key] for key in _PREFERRED if key in tables), None)
    if best is None or not codes:
        return frozenset()
    asked = np.array(sorted(codes), np.int64)
    (form,) = struct.unpack_from(">H", data, best)
    if form == 12:
        return frozenset(asked[_format12(data, best, asked)].tolist())
    if form == 4:
        return frozenset(asked[_format4(data, best, asked)].tolist())
    return frozenset(codes & (font.getBestCmap() or {}).keys())


def _format12(data: bytes, at: int, asked: np.ndarray) -> np.ndarray:
    """Groups of (first code, last code, glyph of the first)."""
    (count,) = struct.unpack_from(">I", data, at + 12)
    groups = np.frombuffer(data, ">u4", 3 * count, at + 16).astype(np.int64).reshape(-1, 3)
    if not count:
        return np.zeros(asked.shape, bool)
    place = np.minimum(np.searchsorted(groups[:, 1], asked), count - 1)
    first, last, glyph = groups[place].T
    return (first <= asked) & (asked <= last) & (glyph + asked - first != 0)


def _format4(data: bytes, at: int, asked: np.ndarray) -> np.ndarray:
    """Segments with a shift, or an offset into an array of glyph numbers, where 0 is no glyph."""
    length, _, twice = struct.unpack_from(">HHH", data, at + 2)
    count = twice // 2
    words = np.frombuffer(data, ">u2", min(length, len(data) - at) // 2, at).astype(np.int64)
    ends, starts = words[7 : 7 + count], words[8 + count : 8 + 2 * count]
    shifts, offsets = words[8 + 2 * count : 8 + 3 * count], words[8 + 3 * count : 8 + 4 * count]
    place = np.minimum(np.searchsorted(ends, asked), count - 1)
    inside = (starts[place] <= asked) & (asked <= ends[place])
    direct = offsets[place] == 0
    # An offset counts bytes from its own place in the table.
    spot = 8 + 3 * count + place + offsets[place] // 2 + asked - starts[place]
    listed = words[np.where(inside & ~direct, np.clip(spot, 0, len(words) - 1), 0)]
    glyph = np.where(direct, asked + shifts[place], np.where(listed, listed + shifts[place], 0))
    return inside & (glyph % 65536 != 0)
