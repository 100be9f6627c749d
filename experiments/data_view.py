"""What a batch holds, sample by sample and token by token, for people: `data_terminal`, `data_page`.

Everything shown is read from the arrays that the model gets; names, files and grids come from the
records behind them.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import numpy as np

from bluelm_jax import aspect_ratio, layout
from bluelm_jax.data.examples import Skipped
from bluelm_jax.data.image_bytes import image_name
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data.sample_checks import lenient
from bluelm_jax.data_config import DataConfig
from bluelm_jax.layout import Side, tokens_per_view
from experiments.token_texts import Token, TokenTexts

Kind = Literal["text", "target", "image", "newline", "padding"]
Batch = Mapping[str, np.ndarray]
MEANINGS: dict[Kind, str] = {
    "text": "context: read, not learned",
    "target": "supervised: the loss counts it",
    "image": "image tokens",
    "newline": "learned newline of the image layout",
    "padding": "padding",
}


@dataclasses.dataclass(frozen=True)
class Piece:
    """Positions [start, stop) of a row that are of one kind; `note` instead of tokens for images."""

    kind: Kind
    start: int
    stop: int
    tokens: tuple[Token, ...] = ()
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Picture:
    """An image of a sample: its file, size, grid, and its views as tiles of the group."""

    file: str
    width: int
    height: int
    cols: int
    rows: int
    tiles: tuple[int, ...]
    thumbnail: int | None


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sample of a row."""

    name: str
    start: int
    stop: int
    supervised: int
    pieces: tuple[Piece, ...]
    pictures: tuple[Picture, ...] = ()

    @property
    def num_views(self) -> int:
        """Tiles that the sample takes."""
        return sum(len(p.tiles) + (p.thumbnail is not None) for p in self.pictures)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row: its samples in order, and the padding behind them."""

    number: int
    group: int
    length: int
    samples: tuple[Sample, ...]

    @property
    def used(self) -> int:
        """Positions that samples take."""
        return sum(sample.stop - sample.start for sample in self.samples)


@dataclasses.dataclass(frozen=True)
class LeftOut:
    """A sample that is not in the batches: why, and whether a run would stop at it."""

    reason: str
    detail: str
    stops: bool


@dataclasses.dataclass(frozen=True)
class View:
    """A batch to look at, with what was left out since the one before."""

    number: int
    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]
    tiles: np.ndarray
    tiles_used: tuple[int, ...]


def kinds(batch: Batch, row: int) -> list[Kind]:
    """The kind of every position of a row."""
    index, weights = batch["image_index"][row], batch["loss_weights"][row]
    found: list[Kind] = []
    for t, segment in enumerate(batch["segments"][row]):
        if segment == 0:
            found.append("padding")
        elif index[t] >= 0:
            found.append("image")
        elif index[t] == layout.NEWLINE:
            found.append("newline")
        else:
            found.append("target" if weights[t] > 0 else "text")
    return found


def pieces(
    batch: Batch, row: int, start: int, stop: int, texts: TokenTexts, per_view: int
) -> Iterator[Piece]:
    """Positions [start, stop) cut where the kind changes."""
    found = kinds(batch, row)

    def kind_at(position: int) -> Kind:
        return found[position]

    for kind, run in itertools.groupby(range(start, stop), key=kind_at):
        span = list(run)
        first, last = span[0], span[-1] + 1
        if kind in ("text", "target"):
            tokens = texts.split(batch["tokens"][row, first:last].tolist(), first)
            yield Piece(kind, first, last, tokens=tuple(tokens))
        else:
            yield Piece(kind, first, last, note=_note(batch, row, kind, first, last, per_view))


def _note(batch: Batch, row: int, kind: Kind, start: int, stop: int, per_view: int) -> str:
    count = stop - start
    if kind == "newline":
        return "newline" if count == 1 else f"{count} newlines"
    views = batch["image_index"][row, start:stop] // per_view
    first, last = int(views.min()), int(views.max())
    tiles = f"tile {first}" if first == last else f"tiles {first}-{last}"
    return f"image: {count} tokens, {tiles}"


class Viewer:
    """Batches of a config as views.

    Samples that a run would stop at are left out and named, so that any data can be looked at.

    Args:
      config: the data config.
      side: tokens along one side of a view, or unordered ones (`layout.token_side`).
    """

    def __init__(self, config: DataConfig, *, side: Side):
        self._config = config
        tolerant = _tolerant(config)
        self._pipeline = Pipeline(tolerant, side=side)
        self._per_view = tokens_per_view(side)
        self._texts = TokenTexts(self._pipeline.tokenizer)
        self.counters = ""

    def views(self, skip: int, count: int) -> Iterator[View]:
        """Batches `skip`, ..., `skip` + `count` - 1.

        Raises:
          ValueError: the data ends before batch `skip`.
        """
        stream = iter(self._pipeline)
        order = self._pipeline.shared_order()
        number = -1
        try:
            for number, batch in zip(range(skip + count), stream, strict=False):
                if number >= skip:
                    keys = [(row, order[place]) for row, place in stream.placed]
                    yield self._view(number, batch, keys, self._left_out(stream.counters.names))
        finally:
            self.counters = stream.counters.summary()
            left_out = self._left_out(stream.counters.names)
            stream.close()
        if number < skip:
            names = "".join(f"\n  {each.reason}: {each.detail}" for each in left_out[:10])
            raise ValueError(f"--skip={skip}: the data ends before that batch{names}")

    def _left_out(self, names: Mapping[str, Sequence[str]]) -> tuple[LeftOut, ...]:
        policies = {
            "invalid_record": self._config.on_invalid_record,
            "unreadable_image": self._config.on_unreadable_image,
            "overlong": self._config.on_overlong,
            "too_many_tiles": self._config.on_too_many_tiles,
        }
        return tuple(
            LeftOut(reason, detail, policies[reason] == "raise")
            for reason in policies
            for detail in names.get(reason, ())
        )

    def _view(
        self, number: int, batch: Batch, keys: Sequence, left_out: tuple[LeftOut, ...]
    ) -> View:
        shape = self._pipeline.shape
        used = [0] * shape.tile_groups
        rows: list[list[Sample]] = [[] for _ in range(shape.batch_size)]
        for row, (source, record) in keys:
            group = shape.group(row)
            start = rows[row][-1].stop if rows[row] else 0
            sample = self._sample(batch, row, start, source, record, used[group])
            if sample is not None:
                rows[row].append(sample)
                used[group] += sample.num_views
        made = [
            Row(i, shape.group(i), shape.seq_len, tuple(samples)) for i, samples in enumerate(rows)
        ]
        return View(number, tuple(made), left_out, batch["tiles"], tuple(used))

    def _sample(
        self, batch: Batch, row: int, start: int, source: int, record: int, first_tile: int
    ) -> Sample | None:
        """The sample whose positions begin at `start`; None for one that left its row empty."""
        segments = batch["segments"][row]
        if start == len(segments) or segments[start] == 0:
            return None
        stop = start + int((segments == segments[start]).sum())
        records, config = self._pipeline.records[source], self._pipeline.config.sources[source]
        maker = self._pipeline.maker
        plan = maker.of_record(maker.make_plan, records, record, config)
        assert not isinstance(plan, Skipped)
        pictures = []
        for span in plan.images if batch["image_index"][row, start:stop].max() >= 0 else ():
            grid = aspect_ratio.choose_grid(span.width, span.height, plan.tiling, plan.num_images)
            tiles = list(range(first_tile, first_tile + span.num_views))
            first_tile += span.num_views
            thumbnail = None
            if plan.tiling.has_thumbnail(grid):
                thumbnail = tiles.pop(0 if plan.tiling.resolved_thumbnail == "first" else -1)
            name = image_name(span.file)
            pictures.append(Picture(name, span.width, span.height, *grid, tuple(tiles), thumbnail))
        return Sample(
            name=plan.name,
            start=start,
            stop=stop,
            supervised=int((batch["loss_weights"][row, start:stop] > 0).sum()),
            pieces=tuple(pieces(batch, row, start, stop, self._texts, self._per_view)),
            pictures=tuple(pictures),
        )


def _tolerant(config: DataConfig) -> DataConfig:
    """`config` with every policy that raises set to leave out, and with room for all names."""
    changed = lenient(config)
    policies = ("on_invalid_record", "on_unreadable_image", "on_overlong", "on_too_many_tiles")
    kept = {name: getattr(config, name) for name in policies if getattr(config, name) != "raise"}
    return dataclasses.replace(changed, **kept, on_full_group="defer", max_names=1000)
