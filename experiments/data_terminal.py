"""A batch as text for a terminal: coloured where that is wanted, marked where it is not."""

from __future__ import annotations

import io
import os
import sys
import unicodedata

from rich.console import Console
from rich.text import Text

from experiments.data_view import MEANINGS, Piece, Row, Sample, View
from experiments.token_texts import printable

# Targets stand out; context is plain. The colours are the terminal's own, so they suit its theme.
_STYLES = {
    "text": "",
    "target": "black on green",
    "image": "white on blue",
    "newline": "white on magenta",
    "padding": "dim",
    "special": "reverse",
    "head": "bold",
    "bad": "red",
}
_ISOLATE, _RELEASE = "\u2068", "\u2069"  # Right-to-left text stays within its own span.


def render(view: View, *, color: bool, width: int | None) -> str:
    """The rows of a batch as lines of at most `width` columns; None does not break them."""
    lines = [_legend(color), Text(f"batch {view.number}", _STYLES["head"])]
    for row in view.rows:
        lines += _row(row, color)
    for each in view.left_out:
        what = "a run would stop here" if each.stops else "left out"
        lines.append(Text(f"{what}: {each.reason}: {printable(each.detail)}", _STYLES["bad"]))
    stream = io.StringIO()
    console = Console(
        file=stream,
        width=width,
        force_terminal=color,
        no_color=not color,
        color_system="standard" if color else None,
        highlight=False,
        legacy_windows=False,
    )
    for line in lines:
        overflow = "fold" if width else "ignore"
        console.print(line, overflow=overflow, soft_wrap=width is None)
    return stream.getvalue()


def _legend(color: bool) -> Text:
    if not color:
        return Text("«supervised» text, ⟨special tokens⟩, [images, newlines and padding]")
    text = Text()
    for kind, meaning in MEANINGS.items():
        text.append(f" {kind} ", _STYLES[kind])
        text.append(f" {meaning}   ")
    return text.append(" special token ", _STYLES["special"])


def _row(row: Row, color: bool) -> list[Text]:
    supervised = sum(sample.supervised for sample in row.samples)
    tiles = sum(sample.num_views for sample in row.samples)
    head = (
        f"row {row.number}: {len(row.samples)} samples, {row.used} of {row.length} positions, "
        f"{supervised} supervised, {tiles} tiles of group {row.group}"
    )
    lines = [Text(head, _STYLES["head"])]
    for number, sample in enumerate(row.samples, 1):
        lines += _sample(number, sample, color)
    if row.used < row.length:
        lines.append(Text(f"[{row.length - row.used} padding]", _STYLES["padding"]))
    return lines


def _sample(number: int, sample: Sample, color: bool) -> list[Text]:
    head = (
        f"│ {number}. {printable(sample.name)}: positions {sample.start}-{sample.stop - 1}, "
        f"{sample.supervised} supervised"
    )
    lines = [Text(head, "bold")]
    for picture in sample.pictures:
        shown = f"{picture.width}x{picture.height}, grid {picture.cols}:{picture.rows}"
        tiles = len(picture.tiles) + (picture.thumbnail is not None)
        thumbnail = "" if picture.thumbnail is None else " with the thumbnail"
        file = printable(picture.file)
        lines.append(Text(f"│ {file}: {shown}, {tiles} tiles{thumbnail}", "dim"))
    body = Text()
    for piece in sample.pieces:
        _add_piece(body, piece, color)
    return [*lines, body]


def _add_piece(body: Text, piece: Piece, color: bool) -> None:
    style = _STYLES[piece.kind]
    if piece.note:
        body.append(f"[{piece.note}]", style)
        return
    marks = ("«", "»") if piece.kind == "target" and not color else ("", "")
    plain = "".join(token.text for token in piece.tokens)
    isolate = any(unicodedata.bidirectional(c) in ("R", "AL") for c in plain)
    body.append(marks[0] + (_ISOLATE if isolate else ""))
    for token in piece.tokens:
        text = printable(token.text)
        if token.special:
            body.append(text if color else f"⟨{text}⟩", f"{style} {_STYLES['special']}".strip())
        else:
            body.append(text, style)
    body.append((_RELEASE if isolate else "") + marks[1])


def use_color(choice: str) -> bool:
    """Whether to colour: `choice`, or what the terminal and NO_COLOR (no-color.org) say."""
    if choice != "auto":
        return choice == "always"
    plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not plain
