"""Where each record of a JSON array or JSON lines file lies, found without parsing it.

A record is found with one regular expression for up to four levels of brackets; deeper ones are
walked bracket by bracket. What stands between records is checked, so nothing passes unnoticed: an
item that is no object gets its index like any other, and is an invalid record when it is read.
"""

from __future__ import annotations

import array
import mmap
import re

import numpy as np

# Starts of files that are not plain UTF-8 text.
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"PK\x03\x04": "zip",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
# A JSON string, or one bracket: all that is needed to find where a record starts and ends.
_STRUCTURE = re.compile(_STRING + rb"|[\[\]{}]", re.DOTALL)
_SPACE = re.compile(rb"[ \t\r\n]*+")
_VISIBLE = re.compile(rb"[^ \t\r\n]")


def _nested(levels: int) -> bytes:
    inner = b"|" + _nested(levels - 1) if levels > 1 else b""
    return rb'[\[{](?:[^"\[\]{}]++|' + _STRING + inner + rb")*+[\]}]"


# One item of the outermost array, and what ends it.
_ITEM = re.compile(
    b"(?:" + _nested(4) + b"|" + _STRING + rb'|[^\s,"\[\]{}]++)(?=[ \t\r\n]*+[,\]])', re.DOTALL
)


def find_spans(data: mmap.mmap, path: str) -> np.ndarray:
    """Start and end byte of each record, int64 [records, 2].

    Args:
      data: the file's bytes, of at least one.
      path: its name for messages.

    Raises:
      ValueError: the file is compressed, not UTF-8, empty, cut off, or goes on behind the array; the
        message names file and byte.
    """
    _check_encoding(bytes(data[:8]), path)
    start = len(_BYTE_ORDER_MARK) if data[:3] == _BYTE_ORDER_MARK else 0
    first = _VISIBLE.search(data, start)
    if first is None:
        raise ValueError(f"{path}: the file holds only white space")
    is_array = first.group() == b"["
    spans = _array_spans(data, path, first.end()) if is_array else _line_spans(data, start)
    return np.frombuffer(spans, np.int64).reshape(-1, 2)


def _check_encoding(prefix: bytes, path: str) -> None:
    for start, kind in _COMPRESSED.items():
        if prefix.startswith(start):
            raise ValueError(f"{path}: the file is compressed ({kind}); decompress it first")
    if prefix[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in prefix[:4]:
        raise ValueError(f"{path}: the text is UTF-16 or UTF-32; convert the file to UTF-8")


def _array_spans(data: mmap.mmap, path: str, at: int) -> array.array:
    """Spans of the items of the outermost array, which opens in front of byte `at`."""
    spans = array.array("q")
    at = _skip_space(data, at)
    while data[at : at + 1] != b"]" or spans:  # Not an empty array.
        end = _item_end(data, path, at, len(spans) // 2)
        spans.append(at)
        spans.append(end)
        at = _skip_space(data, end)
        mark = data[at : at + 1]
        if mark == b"]":
            break
        if mark == b"":
            raise _not_closed(data, path, len(spans) // 2)
        if mark != b",":
            found = _shown(data, at)
            raise ValueError(
                f"{path}: byte {at}: expected ',' or ']' after {len(spans) // 2} records, got {found}"
            )
        at = _skip_space(data, at + 1)
    rest = _VISIBLE.search(data, at + 1)
    if rest is not None:
        raise ValueError(
            f"{path}: byte {rest.start()}: the array of {len(spans) // 2} records is closed, but the "
            f"file goes on with {_shown(data, rest.start())}"
        )
    return spans


def _item_end(data: mmap.mmap, path: str, at: int, before: int) -> int:
    """End of the item that starts at byte `at`, `before` others in front of it."""
    match = _ITEM.match(data, at)
    if match is not None:
        return match.end()
    if at >= len(data):
        raise _not_closed(data, path, before)
    if data[at : at + 1] in (b",", b"]", b"}"):
        raise ValueError(f"{path}: byte {at}: expected a record, got {_shown(data, at)}")
    depth = 0
    for match in _STRUCTURE.finditer(data, at):
        depth += {b"[": 1, b"{": 1, b"]": -1, b"}": -1}.get(match.group(), 0)
        if depth <= 0:
            return match.end()
    raise _not_closed(data, path, before)


def _not_closed(data: mmap.mmap, path: str, whole: int) -> ValueError:
    return ValueError(
        f"{path}: the array is not closed ({whole} whole records in {len(data)} bytes)"
    )


def _skip_space(data: mmap.mmap, at: int) -> int:
    match = _SPACE.match(data, at)
    return at if match is None else match.end()


def _shown(data: mmap.mmap, at: int) -> str:
    return repr(data[at : at + 20].decode(errors="replace"))


def _line_spans(data: mmap.mmap, start: int) -> array.array:
    """Spans of the lines that are not blank."""
    spans = array.array("q")
    size = len(data)
    while start < size:
        end = data.find(b"\n", start)
        end = size if end < 0 else end
        if data[start:end].strip():
            spans.append(start)
            spans.append(end)
        start = end + 1
    return spans
