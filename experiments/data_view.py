"""A batch as a person reads it: coloured text in the terminal, an HTML page with the tiles."""

from __future__ import annotations

import base64
import dataclasses
import html
import io
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image

from bluelm_jax import layout, run_config, serialize
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data.tokenizer import Tokenizer
from bluelm_jax.data_config import DataConfig
from experiments import gin_setup as gin_setup
from gin_configs import command

Kind = Literal["text", "target", "image", "newline", "padding"]
Batch = Mapping[str, np.ndarray]

# Terminal: SGR codes. Targets stand out, context is plain, everything else is dim or blue.
_SGR = {"text": "0", "target": "30;42", "image": "37;44", "newline": "37;45", "padding": "2"}
_STYLE = """
body { font: 15px/1.6 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem }
h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem }
.row { white-space: pre-wrap; font-family: monospace; overflow-wrap: anywhere;
border: 1px solid #ccc; border-radius: 4px; padding: .5rem }
.target { background: #bfe8c5 } .image { background: #c9dcf7 } .newline { background: #e4cdf2 }
.padding { color: #767676 } .sample { border-left: 3px solid #b3541e; padding-left: .3rem }
figure { display: inline-block; margin: .3rem } figcaption { font-size: .8rem; text-align: center }
img { image-rendering: pixelated; border: 1px solid #ccc; display: block }
"""


@dataclasses.dataclass(frozen=True)
class Span:
    """Positions [start, stop) of a row that are of one kind and one sample (segment)."""

    kind: Kind
    start: int
    stop: int
    segment: int


def _kinds(batch: Batch, row: int) -> list[Kind]:
    index = batch["image_index"][row]
    kinds: list[Kind] = []
    for t, segment in enumerate(batch["segments"][row]):
        if segment == 0:
            kinds.append("padding")
        elif index[t] >= 0:
            kinds.append("image")
        elif index[t] == layout.NEWLINE:
            kinds.append("newline")
        else:
            kinds.append("target" if batch["loss_weights"][row, t] > 0 else "text")
    return kinds


def spans(batch: Batch, row: int) -> list[Span]:
    """The row cut where the kind of position or the sample changes."""
    kinds, segments = _kinds(batch, row), batch["segments"][row]
    cuts = [
        t
        for t in range(len(kinds))
        if t == 0 or kinds[t] != kinds[t - 1] or segments[t] != segments[t - 1]
    ]
    ends = [*cuts[1:], len(kinds)]
    return [Span(kinds[a], a, b, int(segments[a])) for a, b in zip(cuts, ends, strict=True)]


def span_text(batch: Batch, row: int, span: Span, tokenizer: Tokenizer, per_view: int) -> str:
    """What a span says: its tokens as text, or a note in brackets."""
    count = span.stop - span.start
    at = slice(span.start, span.stop)
    if span.kind == "padding":
        return f"[{count} padding]"
    if span.kind == "newline":
        return "[newline]" if count == 1 else f"[{count} newlines]"
    if span.kind == "image":
        views = batch["image_index"][row, at] // per_view
        first, last = int(views.min()), int(views.max())
        tiles = f"tile {first}" if first == last else f"tiles {first}-{last}"
        return f"[image: {count} tokens, {tiles}]"
    return token_text(batch["tokens"][row, at], tokenizer)


def token_text(ids: np.ndarray, tokenizer: Tokenizer) -> str:
    """Text of ids in which special tokens show: runs of ordinary ids are decoded together."""
    parts: list[str] = []
    run: list[int] = []
    for token in [*ids.tolist(), None]:
        if token is not None and tokenizer.decode([token]):
            run.append(token)
            continue
        parts.append(tokenizer.decode(run) if run else "")
        run = []
        if token is not None:
            parts.append(tokenizer.token_text(token))
    return "".join(parts)


def terminal(batch: Batch, tokenizer: Tokenizer, per_view: int, color: bool = True) -> str:
    """Rows as text; a bar opens each sample, targets are green, images blue."""
    lines = []
    for row in range(len(batch["tokens"])):
        lines.append(f"row {row}: {summary(batch, row)}")
        parts, segment = [], 0
        for span in spans(batch, row):
            if span.segment != segment and span.segment:
                parts.append(f"\n| sample {span.segment}: ")
            segment = span.segment
            text = span_text(batch, row, span, tokenizer, per_view)
            if color:
                text = f"\x1b[{_SGR[span.kind]}m{text}\x1b[0m"
            parts.append(f"«{text}»" if span.kind == "target" and not color else text)
        lines.append("".join(parts).lstrip("\n") + "\n")
    return "\n".join(lines)


def summary(batch: Batch, row: int) -> str:
    """Counts of a row."""
    segments = batch["segments"][row]
    used, targets = int((segments > 0).sum()), int((batch["loss_weights"][row] > 0).sum())
    images = int((batch["image_index"][row] >= 0).sum())
    return (
        f"{int(segments.max())} samples, {used} of {len(segments)} positions, "
        f"{targets} supervised, {images} image tokens"
    )


def page(batch: Batch, tokenizer: Tokenizer, per_view: int, title: str) -> str:
    """A self-contained HTML page: the rows, and the tiles of each group."""
    count = len(batch["tokens"])
    rows = "".join(_row_html(batch, row, tokenizer, per_view) for row in range(count))
    groups = "".join(_group_html(batch, group) for group in range(len(batch["tiles"])))
    kinds = ("text", "target", "image", "newline", "padding")
    legend = " ".join(f'<span class="{kind}">{kind}</span>' for kind in kinds)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style><h1>{html.escape(title)}</h1><p>{legend}</p>{rows}{groups}</html>"
    )


def show(
    config: DataConfig, *, side: int, skip: int, batches: int, html_path: str | None, color: bool
) -> str:
    """Batches of a config as text; the last one is written to `html_path` as a page as well.

    Raises:
      ValueError: the data ends before batch `skip`.
    """
    pipeline, per_view = Pipeline(config, side=side), side**2
    stream = iter(pipeline)
    chosen = list(itertools.islice(enumerate(stream), skip, skip + batches))
    stream.close()
    if not chosen:
        raise ValueError(f"--skip={skip}: the data ends before that batch")
    shown = [
        f"batch {number}\n{terminal(batch, pipeline.tokenizer, per_view, color)}"
        for number, batch in chosen
    ]
    if html_path is not None:
        number, batch = chosen[-1]
        text = page(batch, pipeline.tokenizer, per_view, f"Batch {number}")
        Path(html_path).write_text(text, encoding="utf-8")
    return "\n".join([*shown, stream.counters.summary()])


def configured_run(directory: str | None) -> run_config.RunConfig:
    """The run of --run=DIRECTORY, or else of --gin_file and --gin_bindings (`RunConfig.data`, ...)."""
    if directory is not None:
        if command.GIN_FILE.value or command.GIN_BINDINGS.value:
            raise ValueError("--run takes the run's own config; leave the gin flags out")
        return serialize.load_run_config(directory)
    return command.build(run_config.RunConfig)


def _row_html(batch: Batch, row: int, tokenizer: Tokenizer, per_view: int) -> str:
    parts, segment = [], 0
    for span in spans(batch, row):
        if span.segment != segment and span.segment:
            parts.append("\n" if segment else "")
            parts.append(f'<span class="sample">sample {span.segment}: </span>')
        segment = span.segment
        text = html.escape(span_text(batch, row, span, tokenizer, per_view))
        where = f"{span.start}-{span.stop - 1}"
        parts.append(f'<span class="{span.kind}" title="{where}">{text}</span>')
    return f'<h2>Row {row}: {summary(batch, row)}</h2><div class="row">{"".join(parts)}</div>'


def _used_tiles(batch: Batch, group: int) -> Iterator[int]:
    """Tiles of a group up to the last one that is not all zero."""
    filled = np.flatnonzero(batch["tiles"][group].any(axis=(1, 2, 3)))
    yield from range(int(filled[-1]) + 1 if len(filled) else 0)


def _group_html(batch: Batch, group: int) -> str:
    tiles = batch["tiles"][group]
    figures = []
    for i in _used_tiles(batch, group):
        stream = io.BytesIO()
        Image.fromarray(tiles[i]).save(stream, "PNG")
        data = base64.b64encode(stream.getvalue()).decode()
        width = max(64, min(256, tiles.shape[2]))
        picture = f'<img width="{width}" alt="tile {i}" src="data:image/png;base64,{data}">'
        figures.append(f"<figure>{picture}<figcaption>tile {i}</figcaption></figure>")
    used = f"{len(figures)} of {len(tiles)} tiles"
    return f"<h2>Tiles of group {group}: {used}</h2>{''.join(figures)}"
