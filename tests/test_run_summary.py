"""What --dry_run says about costs and packing."""

import dataclasses
import re

import pytest
from data_helpers import write_dataset
from model_helpers import make_run, replace

from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import Packing, SourceConfig, TokenizerFile
from experiments import ablation, run_summary


@pytest.fixture
def run(tmp_path):
    run = make_run(write_dataset(tmp_path, count=40))
    return replace(
        run, "data", packing=Packing(), seq_len=200, batch_size=4, tile_groups=2, epochs=1
    )


def test_costs_are_printed(run):
    text = run_summary.describe_run(run)
    for line in ("forward .* TFLOP", "step .* TFLOP", "kept for the backward pass .* MiB"):
        assert re.search(line, text)


def test_packing_is_measured_where_the_files_are_there(run):
    (line,) = run_summary.describe_packing(run)
    group = dataclasses.replace(run.data, batch_size=2, tile_groups=1)
    found = Pipeline(group, side=run.token_side).measure_packing()
    assert f"tiles_per_group = {found.tiles_per_group} suits 2 rows a group" in line
    assert f"the config has {run.data.tiles_per_group}" in line
    assert run_summary.describe_packing(replace(run, "data", packing=None)) == []


def test_packing_is_not_measured_without_the_files(run, tmp_path):
    absent = SourceConfig(path=str(tmp_path / "no.json"))
    (line,) = run_summary.describe_packing(replace(run, "data", sources=(absent,)))
    assert line == f"packing: not measured, {absent.path} is not there"
    tokenizer = TokenizerFile(path=str(tmp_path / "t.json"))
    (line,) = run_summary.describe_packing(replace(run, "data", tokenizer=tokenizer))
    assert "t.json is not there" in line


def test_an_ablation_with_packing_keeps_the_rows_and_measures_the_tiles(run):
    fitted = ablation.fit_room(run)
    assert fitted.data.seq_len == run.data.seq_len
    found = Pipeline(run.data, side=run.token_side).measure_packing()
    assert fitted.data.tiles_per_group == found.tiles_per_group
