"""What data a run reads and how it becomes batches, as frozen dataclasses.

Nothing here opens a file or imports JAX. Numbers that follow from the model (tokens along one side
of a view) are arguments of the functions that need them, so that they are written down once.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Literal

from bluelm_jax import schemes
from bluelm_jax.checks import check, check_positive


@dataclasses.dataclass(frozen=True, kw_only=True)
class ByteTokens:
    """The built-in byte tokenizer: 256 bytes, <pad>, <s>, </s>, <image> and the extra tokens."""

    extra_special_tokens: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A Hugging Face `tokenizer.json` and its special tokens by name; None for "has none"."""

    path: str
    bos: str | None = "<s>"
    eos: str | None = "</s>"
    pad: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentencePieceFile:
    """A SentencePiece `.model`; needs the optional package `sentencepiece`."""

    path: str


TokenizerChoice = ByteTokens | TokenizerFile | SentencePieceFile


def _check_whole(owner: object, *fields: str) -> None:
    """Raises ValueError for the first of `fields` that is neither None nor a whole number."""
    for field in fields:
        value = getattr(owner, field)
        whole = value is None or (isinstance(value, int) and not isinstance(value, bool))
        check(owner, field, whole, "None or an int")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """Records to read and the folder their image paths start from.

    Attributes:
      path: a LLaVA JSON file (one array) or JSONL file (one record a line), a folder made by
        `experiments.prepare_data` or `.array_record` files, or a Hugging Face data set on disk (a
        `save_to_disk` folder, or a folder of parquet or arrow files). A file's name may be a
        pattern with `*`, for ArrayRecord, parquet and arrow.
      image_root: folder that the `image` entries are relative to and must not lead out of; '' is
        the folder that `path` lies in.
      name: what tables call the source; '' is the file's name without its ending.
      weight: share of this source in a mixture, relative to the others.
      repeat: how often one epoch of the mixture has each sample, fractions allowed; None mixes by
        `weight`. Every source of a mixture has a repeat, or none has.
      first: use the first so many records only; None uses all.
      random: use so many records only, drawn by `DataConfig.seed`; None uses all.
      template: overrides `DataConfig.template` for this source.
      tiling: overrides `DataConfig.tiling` for this source; of the same tile size.
      index_dir: folder for a JSON file's offset index, shared by all workers as a memory map; None
        keeps 16 bytes a record in each process.
    """

    path: str
    image_root: str = ""
    name: str = ""
    weight: float = 1.0
    repeat: float | None = None
    first: int | None = None
    random: int | None = None
    template: str | None = None
    tiling: schemes.Tiling | None = None
    index_dir: str | None = None

    def __post_init__(self):
        check(self, "path", bool(self.path), "a file or folder")
        check_positive(self, "weight")
        for field in ("repeat", "first", "random"):
            value = getattr(self, field)
            check(self, field, value is None or value > 0, "None or > 0")
        check(self, "weight", math.isfinite(self.weight), "finite")
        check(self, "repeat", self.repeat is None or math.isfinite(self.repeat), "None or finite")
        _check_whole(self, "first", "random")
        alone = self.repeat is None or self.weight == 1
        check(self, "repeat", alone, f"None beside weight = {self.weight}; give one of the two")
        alone = self.random is None or self.first is None
        check(self, "random", alone, f"None beside first = {self.first}; give one of the two")

    @property
    def label(self) -> str:
        """`name`, or the last part of `path` without its ending."""
        return self.name or os.path.basename(self.path.rstrip("/\\")).split(".")[0] or self.path

    @property
    def folder(self) -> str:
        """Where image paths start: `image_root`, or the folder that `path` lies in."""
        return self.image_root or os.path.dirname(self.path.rstrip("/\\"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Packing:
    """Several samples a row; attention and positions stay within a sample.

    Samples wait in a bounded buffer, in their order, for a row that suits them.

    Attributes:
      fit: 'best' fills one row after the other: the sample that has waited longest, and the set of
        waiting samples that leaves fewest positions and tiles unused beside it; none waits for more
        than lookahead / tile_groups batches. 'first' puts each sample into the first row with room
        and closes a batch when `lookahead` samples wait; they are first in line for the next one.
      lookahead: samples that may wait. More wastes less and costs their memory, mostly their tiles.
      max_samples_per_row: bound on the samples of one row; None for no bound. Where it binds, the
        search of 'best' is exact as long as its table is small (`packing.MOST_BITS`); else it takes
        at most about twice the time of a search without the bound, and mostly the same memory.
    """

    fit: Literal["best", "first"] = "best"
    lookahead: int = 64
    max_samples_per_row: int | None = None

    def __post_init__(self):
        check(self, "fit", self.fit in ("best", "first"), "one of best, first")
        check_positive(self, "lookahead")
        limit = self.max_samples_per_row
        check(self, "max_samples_per_row", limit is None or limit > 0, "None or > 0")


_SKIP = ("raise", "skip")
_PLAIN = schemes.Plain()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """How records become batches.

    Attributes:
      sources: what to read; several are mixed, by weight or by repeat. Reading needs at least one.
      template: name of a conversation template (`bluelm_jax.data.conversation.TEMPLATES`).
      system: system message of every sample that brings none; '' for none.
      tokenizer: which tokenizer.
      tiling: how an image is cut into views.
      layout: how views stand in the sequence.
      seq_len: positions of a row (L).
      batch_size: rows of a batch (B) on this host.
      tile_groups: groups of rows that share a pool of tiles (G); divides batch_size.
      tiles_per_group: tiles in the pool of one group (I); `pipeline.measure` finds the least.
      packing: None puts one sample in each row.
      shuffle: shuffle each epoch, differently every time; False reads in file order.
      seed: seed of the shuffle.
      epochs: passes over the data; None repeats for ever. A mixture by weight ends where it
        is the turn of a source that is through; one epoch of a mixture by repeat is all its
        samples, each as often as its source says.
      drop_remainder: with finite epochs, leave out the last, incomplete batch; False fills it
        with empty rows.
      num_workers: processes that decode images; 0 works in this process.
      num_threads: threads in each process that decode images; 0 decodes on demand.
      prefetch: samples that each process prepares ahead.
      cache_mb: keep prepared samples in memory up to this many megabytes (shared out over the
        workers), so that later epochs decode nothing; 0 keeps none. What is kept stays; nothing
        is evicted.
      max_megapixels: images with more (width * height / 1e6) count as unreadable.
      max_aspect_ratio: images whose longer side / shorter side is above it count as unreadable.
      on_unreadable_image: 'raise', 'skip' the sample, or 'replace_with_text_only': keep the
        sample's text without any image.
      on_invalid_record: 'raise' or 'skip': image counts that differ, unknown speakers, samples
        without a supervised token.
      on_overlong: 'raise', 'drop' the sample, or 'truncate_text': cut at the end; a cut that would
        fall inside an image moves in front of it.
      on_too_many_tiles: 'raise' or 'skip', for one sample with more tiles than a group holds.
      on_full_group: 'raise', or 'defer': a sample whose tiles no longer fit waits for the next
        batch, and the rows that it leaves stay empty. Packing always defers.
      max_names: how many sample names each counter keeps.
    """

    sources: tuple[SourceConfig, ...] = ()
    template: str = "bluelm"
    system: str = ""
    tokenizer: TokenizerChoice = ByteTokens()
    tiling: schemes.Tiling
    layout: schemes.Layout = _PLAIN
    seq_len: int
    batch_size: int
    tile_groups: int = 1
    tiles_per_group: int
    packing: Packing | None = None
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = None
    drop_remainder: bool = True
    num_workers: int = 0
    num_threads: int = 2
    prefetch: int = 16
    cache_mb: int = 0
    max_megapixels: float = 64.0
    max_aspect_ratio: float = 200.0
    on_unreadable_image: Literal["raise", "skip", "replace_with_text_only"] = "raise"
    on_invalid_record: Literal["raise", "skip"] = "raise"
    on_overlong: Literal["raise", "drop", "truncate_text"] = "raise"
    on_too_many_tiles: Literal["raise", "skip"] = "raise"
    on_full_group: Literal["raise", "defer"] = "raise"
    max_names: int = 20

    def __post_init__(self):
        check_positive(self, "seq_len", "batch_size", "tile_groups", "max_megapixels")
        check(self, "max_aspect_ratio", self.max_aspect_ratio >= 1, ">= 1")
        even = self.batch_size % self.tile_groups == 0
        check(self, "tile_groups", even, f"a divisor of batch_size = {self.batch_size}")
        for field in ("tiles_per_group", "num_workers", "num_threads", "prefetch", "cache_mb"):
            check(self, field, getattr(self, field) >= 0, ">= 0")
        check(self, "max_names", self.max_names >= 0, ">= 0")
        check(self, "seed", 0 <= self.seed < 2**32, "in 0..2**32 - 1")
        check(self, "epochs", self.epochs is None or self.epochs > 0, "None or > 0")
        _check_whole(self, "epochs")
        self._check_sources()
        self._check_choice("on_unreadable_image", *_SKIP, "replace_with_text_only")
        self._check_choice("on_overlong", "raise", "drop", "truncate_text")
        self._check_choice("on_full_group", "raise", "defer")
        self._check_choice("on_invalid_record", *_SKIP)
        self._check_choice("on_too_many_tiles", *_SKIP)

    def _check_sources(self):
        kinds = {source.repeat is None: source for source in self.sources}
        if len(kinds) > 1:
            raise ValueError(
                f"DataConfig.sources: {kinds[False].label!r} has a repeat and {kinds[True].label!r} "
                "has none; mix by repeat (1 is every sample once an epoch) or by weight, not both"
            )
        for source in self.sources:
            size = self.tiling.tile_size if source.tiling is None else source.tiling.tile_size
            if size != self.tiling.tile_size:
                raise ValueError(
                    f"SourceConfig.tiling of {source.label!r}: tile_size = {size}, but "
                    f"DataConfig.tiling has {self.tiling.tile_size}; all sources share one"
                )

    def _check_choice(self, field: str, *choices: str):
        check(self, field, getattr(self, field) in choices, f"one of {', '.join(choices)}")

    @property
    def rows_per_group(self) -> int:
        """Rows that share one pool of tiles."""
        return self.batch_size // self.tile_groups
