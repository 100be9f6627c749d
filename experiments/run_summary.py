"""What a training run is, in text: its config, costs, batch shapes and sources."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence

import jax

from bluelm_jax import layout
from bluelm_jax.data import mixture
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data.sources import Records
from bluelm_jax.data_config import ByteTokens
from bluelm_jax.run_config import RunConfig
from experiments import cli, gin_setup


def describe_run(run: RunConfig) -> str:
    """What --dry_run prints: config, parameters, batch shapes, bytes."""
    data = run.data
    size = run.model.vision.tile_size
    pixels = data.tile_groups * data.tiles_per_group * size * size * 3
    queries = data.tile_groups * data.tiles_per_group * layout.tokens_per_view(run.token_side)
    return "\n".join(
        [
            gin_setup.describe(run),
            "",
            cli.model_summary(run.model),
            cli.cost_summary(run),
            f"trained: {', '.join(run.train.trainable)}",
            f"batch on this host: tokens [{data.batch_size}, {data.seq_len}], tiles "
            f"[{data.tile_groups}, {data.tiles_per_group}, {size}, {size}, 3] "
            f"({pixels / 2**20:.1f} MiB, {queries:,} image tokens)",
            f"steps: {run.train.steps:,} of {data.batch_size * jax.process_count():,} rows "
            f"in {run.train.accumulation} micro-batches",
            describe_mixture(run),
            *describe_packing(run),
        ]
    )


def describe_packing(run: RunConfig) -> list[str]:
    """How full packed rows will be and which number of tiles suits them, where the files are there.

    Measured on one group of rows over the first samples, from image headers.
    """
    data = run.data
    if data.packing is None:
        return []
    tokenizer = [] if isinstance(data.tokenizer, ByteTokens) else [data.tokenizer.path]
    missing = [p for p in (*tokenizer, *(s.path for s in data.sources)) if not os.path.exists(p)]
    if missing:
        return [f"packing: not measured, {missing[0]} is not there"]
    group = dataclasses.replace(data, batch_size=data.rows_per_group, tile_groups=1)
    found = Pipeline(group, side=run.token_side).measure_packing()
    return [
        f"packing: tiles_per_group = {found.tiles_per_group} suits {data.rows_per_group} rows a "
        f"group of this data (positions {found.position_fill:.1%}, tile slots "
        f"{found.tile_fill:.1%} in use); the config has {data.tiles_per_group}"
    ]


def describe_mixture(run: RunConfig, records: Sequence[Records] | None = None) -> str:
    """The sources' sizes, shares and epochs; without `records` their files are opened, where there."""
    rows = run.data.batch_size * jax.process_count()
    return mixture.table(run.data, run.train.steps, rows, records)
