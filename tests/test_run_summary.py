"""What --dry_run says about costs and packing."""

import contextlib
import dataclasses
import re

import pytest
from data_helpers import write_dataset
from model_helpers import make_run, replace

from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import Packing, SourceConfig, TokenizerFile
from experiments import ablation, cli, run_summary


@pytest.fixture
def run(tmp_path):
    run = make_run(write_dataset(tmp_path, count=40))
    return replace(
        run, "data", packing=Packing(), seq_len=200, batch_size=4, tile_groups=2, epochs=1
    )


def test_costs_are_printed(run):
    text = run_summary.describe_run(run)
    for line in (r"forward +[\d,.]+ [kMGT]FLOP", r"step +[\d,.]+ [kMGT]FLOP",
                 r"kept for the backward pass .* MiB"):  # fmt: skip
        assert re.search(line, text)
    forward = re.search(r"forward +([\d.]+) ", text)
    assert forward and 1 <= float(forward[1]) < 1000  # In a unit that suits it.


@pytest.mark.parametrize(
    ("size", "text", "total"),
    [
        (6_300_000_000, "6.30 GB", "MB 6300"),
        (12_345_678, "12.35 MB", "kB 12346"),
        (21_500, "21.50 kB", "bytes 21500"),
        (7, "7 bytes", "bytes 7"),
    ],
)
def test_sizes_and_bars_have_a_unit_that_suits_them(size, text, total, monkeypatch):
    seen = []

    @contextlib.contextmanager
    def bar(description, total):
        seen.append(f"{description} {total}")
        yield seen.append

    monkeypatch.setattr(cli, "progress_bar", bar)
    with cli.byte_bar("importing", size) as update:
        update(0)
        update(size)
    assert cli.size_text(size) == text
    assert seen == [f"importing, {total}", 0, int(total.split()[1])]


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
