"""Reads held-out samples with trained weights: prompts, generation, one reading a sample."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from bluelm_jax import aspect_ratio, chat, generate, layout
from bluelm_jax.checks import check, check_positive
from bluelm_jax.data import batching, images, sources
from bluelm_jax.data import tokenizer as tokenizers
from bluelm_jax.data.counters import Counters
from bluelm_jax.data.examples import LEFT_OUT, Example
from bluelm_jax.data.image_bytes import ImageBytes
from bluelm_jax.data.opening import open_records
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import SourceConfig
from bluelm_jax.evals import metrics
from bluelm_jax.params import Tree
from bluelm_jax.run_config import RunConfig
from experiments import gin_setup as gin_setup  # It registers SamplingConfig.
from gin_configs import binding


@binding.register
@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """How held-out samples are read.

    Attributes:
      batch_size: prompts generated together.
      limit: samples read, from the start of the file; 0 reads all.
      sampling: how tokens are chosen; greedy by default.
    """

    batch_size: int = 50
    limit: int = 0
    sampling: generate.SamplingConfig = generate.SamplingConfig(max_new_tokens=32)

    def __post_init__(self):
        check_positive(self, "batch_size")
        check(self, "limit", self.limit >= 0, ">= 0")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """One sample's outcome. `grid` is (columns, rows) of its first image, None without one."""

    name: str
    image: str | None
    bucket: str
    grid: tuple[int, int] | None
    views: int
    tokens: int
    reference: str
    prediction: str
    stopped: bool

    @property
    def correct(self) -> bool:
        """Whether prediction and reference are equal up to surrounding white space."""
        return bool(metrics.exact_match(self.prediction, self.reference))


def eval_run(
    run: RunConfig, source: SourceConfig, batch_size: int, new_tokens: int = 1
) -> RunConfig:
    """`run` over the prompts of `source`, in order, once, with room for those that the model holds.

    Raises:
      ValueError: the model's `max_length` has no room for a prompt and `new_tokens`.
    """
    most = run.model.decoder.max_length - new_tokens
    if most <= 0:
        raise ValueError(
            f"SamplingConfig.max_new_tokens = {new_tokens}: leaves no room for a prompt within the "
            f"model's max_length = {run.model.decoder.max_length}"
        )
    data = dataclasses.replace(
        run.data, sources=(source,), shuffle=False, epochs=1, batch_size=batch_size, packing=None,
        tile_groups=1, num_workers=0, seq_len=run.model.decoder.max_length,
        tiles_per_group=1, drop_remainder=False,
    )  # fmt: skip
    train = dataclasses.replace(run.train, accumulation=1)
    room = Pipeline(data, side=run.token_side).measure(prompts=True)
    length = min(room.max_length, most)  # Longer ones are named when read.
    data = dataclasses.replace(data, seq_len=length, tiles_per_group=room.tiles_per_group)
    return dataclasses.replace(run, data=data, train=train)


def to_prompts(arrays: Mapping[str, np.ndarray]) -> generate.Prompts:
    """The arrays of `batching.batch_prompts` as the generator takes them."""
    names = [field.name for field in dataclasses.fields(generate.Prompts)]
    return generate.Prompts(**{n: jnp.asarray(arrays[n]) for n in names if n in arrays})


def prompt_batches(
    run: RunConfig, limit: int, counters: Counters | None = None, new_tokens: int = 1
) -> Iterator[tuple[Sequence[Example], generate.Prompts]]:
    """Prompts of `run.data`, batch by batch; missing prompts are empty rows.

    `counters` counts and names what is left out or changed.
    """
    pipeline = Pipeline(run.data, side=run.token_side)
    shape = pipeline.shape
    waiting: list[Example] = []

    def batch() -> tuple[Sequence[Example], generate.Prompts]:
        arrays = batching.batch_prompts(waiting, shape)
        return list(waiting), to_prompts(arrays)

    found = pipeline.prompts(counters=counters, answered=True, new_tokens=new_tokens)
    for prompt in itertools.islice(found, limit or None):
        # Samples with bad pixels were measured too; without them, batches have other mates.
        tiles = prompt.num_views + sum(each.num_views for each in waiting)
        if len(waiting) == shape.batch_size or tiles > shape.tiles_per_group:
            yield batch()
            waiting = []
        waiting.append(prompt)
    if waiting:
        yield batch()


def predictions(
    weights: Tree,
    run: RunConfig,
    cfg: EvalConfig,
    counters: Counters,
    progress: Callable[[int], None] | None = None,
) -> tuple[list[Example], list[str], list[bool]]:
    """Prompts, generated texts, and whether each stopped by itself."""
    tokenizer = tokenizers.load(run.data.tokenizer)
    prompts, texts, stopped = [], [], []
    stop, new = chat.stop_token(run, tokenizer), cfg.sampling.max_new_tokens
    for examples, batch in prompt_batches(run, cfg.limit, counters, new):
        out = generate.generate(
            weights, batch, jax.random.key(0), cfg=run.model, sampling=cfg.sampling, stop=stop
        )
        tokens, lengths = np.asarray(out.tokens), np.asarray(out.lengths)
        for i, example in enumerate(examples):
            prompts.append(example)
            texts.append(tokenizer.decode(tokens[i, : lengths[i]].tolist()))
            stopped.append(bool(out.stopped[i]))
        if progress is not None:
            progress(len(prompts) + (0 if cfg.limit else left_out(counters)))
    return prompts, texts, stopped


def bucket_of(record: Mapping, width: int, height: int) -> str:
    """The record's own bucket, else its shape: wide, landscape, square, portrait or tall."""
    if "bucket" in record:
        return str(record["bucket"])
    ratio = width / height
    for bound, name in ((0.5, "tall"), (0.9, "portrait"), (1.1, "square"), (2.0, "landscape")):
        if ratio <= bound:
            return name
    return "wide"


def evaluate(
    weights: Tree,
    run: RunConfig,
    source: SourceConfig,
    cfg: EvalConfig,
    progress: Callable[[int], None] | None = None,
    counters: Counters | None = None,
) -> list[Reading]:
    """Reads every sample of `source` with the model; `run` tells tiling, template and tokenizer.

    What the run's policies leave out or change is said on stderr and counted in `counters`.

    Raises:
      ValueError: no sample is left to read, or a policy is to raise for one.
    """
    run = eval_run(run, source, cfg.batch_size, cfg.sampling.max_new_tokens)
    counters = Counters(run.data.max_names) if counters is None else counters
    prompts, texts, stopped = predictions(weights, run, cfg, counters, progress)
    if not prompts:
        raise ValueError(f"no sample of {source.path} is left to read: {counters.report()}")
    if progress is not None:
        progress(num_samples(source, cfg))
    if counters.counts:
        print(f"left out or changed: {counters.report()}", file=sys.stderr)
    _warn_of_short_answers(prompts, run, cfg)
    records = open_records(source, run.data.seed)
    index = _records_by_name(records)
    return [
        _reading(prompt, text, done, records[index[prompt.name]], source, run)
        for prompt, text, done in zip(prompts, texts, stopped, strict=True)
    ]


def _records_by_name(records: sources.Records) -> dict[str, int]:
    """Where each sample stands, by the name of its prompt; without what is no record."""
    index = {}
    for i in range(len(records)):
        with contextlib.suppress(sources.InvalidRecordError):
            index[sources.sample_name(records[i], records.where(i))] = i
    return index


def _warn_of_short_answers(prompts: Sequence[Example], run: RunConfig, cfg: EvalConfig) -> None:
    """Says so where no answer could have been as long as its reference."""
    tokenizer, room = tokenizers.load(run.data.tokenizer), cfg.sampling.max_new_tokens
    longer = [p.name for p in prompts if len(tokenizer.encode(p.reference)) + 1 > room]
    if longer:
        print(
            f"SamplingConfig.max_new_tokens = {room} is too short for the references of "
            f"{len(longer)} of {len(prompts)} samples, such as {longer[0]}",
            file=sys.stderr,
        )


def _reading(
    prompt: Example, text: str, stopped: bool, record: Mapping, source: SourceConfig, run: RunConfig
) -> Reading:
    files = sources.image_files(record, prompt.name)
    path, grid, bucket = None, None, "text"
    if files and prompt.num_views:  # Without views a policy took the images away.
        file, path = files[0], None  # Bytes within a shard have no path to show.
        if not isinstance(file, ImageBytes):
            file = path = os.path.join(source.folder, file)
        width, height = images.read_size(file)
        tiling = source.tiling or run.data.tiling
        cols, rows = aspect_ratio.choose_grid(width, height, tiling, len(files))
        grid = (cols, rows)
        bucket = bucket_of(record, width, height)
    return Reading(
        name=prompt.name, image=path, bucket=bucket, grid=grid, views=prompt.num_views,
        tokens=int((prompt.image_index != layout.TEXT).sum()),
        reference=prompt.reference, prediction=text, stopped=stopped,
    )  # fmt: skip


def scores(readings: Sequence[Reading]) -> dict[str, float]:
    """Means over samples."""
    accuracy = [metrics.character_accuracy(r.prediction, r.reference) for r in readings]
    return {
        "samples": len(readings),
        "exact_match": float(np.mean([r.correct for r in readings])),
        "character_accuracy": float(np.mean(accuracy)),
        "tokens": float(np.mean([r.tokens for r in readings])),
        "unfinished": int(sum(not r.stopped for r in readings)),
    }


def left_out(counters: Counters) -> int:
    """Samples that were not read."""
    return sum(counters.counts.get(reason, 0) for reason in LEFT_OUT)


def num_samples(source: SourceConfig, cfg: EvalConfig) -> int:
    """Samples that `evaluate` reads if none is left out."""
    records = len(open_records(source))
    return min(cfg.limit, records) if cfg.limit else records


def readings_from(rows: Sequence[Mapping]) -> list[Reading]:
    """Readings of the dicts that `dataclasses.asdict` made of them, by way of JSON."""
    return [Reading(**{**row, "grid": row["grid"] and tuple(row["grid"])}) for row in rows]
