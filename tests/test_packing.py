"""Choosing what shares a row: exact sums, fairness, fills, and packed against unpacked results."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from data_helpers import make_pipeline, record, write_dataset, write_image, write_json
from hypothesis import given
from hypothesis import strategies as st

from bluelm_jax.data import measure, packing
from bluelm_jax.data.batching import BatchShape
from bluelm_jax.data.packing import FirstFit, Size, SubsetSums
from bluelm_jax.data_config import Packing

SHAPE = BatchShape(
    batch_size=4,
    seq_len=12,
    tile_groups=2,
    tiles_per_group=3,
    tile_size=2,
    tokens_per_view=2,
    max_samples_per_row=None,
)


# First fit -------------------------------------------------------------------------------------------


def test_first_fit():
    packer = FirstFit(SHAPE)
    assert packer.place(8, 2) == 0
    assert packer.place(6, 2) == 2  # Row 1 has room, but its group only one tile.
    assert packer.place(4, 1) == 0
    assert packer.place(1, 0) == 1
    assert packer.place(12, 0) == 3
    assert packer.place(11, 1) is None
    assert packer.full_group(11) == 0
    assert packer.full_group(12) is None
    assert not packer.is_full


def test_one_sample_a_row_keeps_the_order():
    packer = FirstFit(dataclasses.replace(SHAPE, max_samples_per_row=1))
    assert [packer.place(1, 0) for _ in range(5)] == [0, 1, 2, 3, None]
    assert packer.is_full


# The best set ----------------------------------------------------------------------------------------


def test_the_best_company_by_hand():
    shape = dataclasses.replace(SHAPE, batch_size=1, tile_groups=1, tiles_per_group=4)
    sizes = [Size(4, 1), Size(5, 1), Size(6, 2), Size(3, 2), Size(2, 3), Size(5, 1)]
    # 4 + 5 + 3 positions and 1 + 1 + 2 tiles: nothing is left; the earlier of the two fives goes.
    assert packing.choose(sizes, shape, free=4, rows_left=1) == [0, 1, 3]
    # With two tiles left the row cannot be filled: 4 + 5.
    assert packing.choose(sizes, shape, free=2, rows_left=1) == [0, 1]
    # The row's even share of four tiles is two, so that the other row can be filled as well.
    assert packing.choose(sizes, shape, free=4, rows_left=2) == [0, 1]
    assert packing.choose([Size(4, 3), Size(5, 0)], shape, free=2, rows_left=1) == [1]
    assert packing.choose([Size(4, 3)], shape, free=2, rows_left=1) == []


pairs = st.lists(st.builds(Size, st.integers(1, 9), st.integers(0, 3)), max_size=7)


@given(pairs, st.integers(0, 14), st.integers(0, 5), st.integers(0, 7))
def test_subset_sums_are_those_of_all_subsets(sizes, length, views, count):
    room, count = Size(length, views), min(count, len(sizes))
    fit = [each for each in sizes if each.length <= length and each.num_views <= views]
    count = min(count, len(fit))
    fullest = {}
    for members in range(count + 1):
        for chosen in itertools.combinations(fit, members):
            total = Size(sum(c.length for c in chosen), sum(c.num_views for c in chosen))
            if total.length <= length and total.num_views <= views:
                best = fullest.get(total.num_views, -1)
                fullest[total.num_views] = max(best, total.length)
    sums = SubsetSums(fit, room, count)
    assert {total.num_views: total.length for total in sums.fullest()} == fullest
    for total in sums.fullest():
        members = sums.members(total)
        assert len(set(members)) == len(members) <= count
        assert sum(fit[i].length for i in members) == total.length
        assert sum(fit[i].num_views for i in members) == total.num_views


def pack_all(sizes, shape, rule):
    """(batch, row, index into sizes) of every sample, and how many waited after each batch."""
    items = iter([(i, size) for i, size in enumerate(sizes)])

    @dataclasses.dataclass(frozen=True)
    class Item:
        at: int
        length: int
        num_views: int

    def read():
        found = next(items, None)
        return None if found is None else Item(found[0], *found[1])

    queue, placed, waiting = [], [], []
    for batch in itertools.count():
        filled = packing.fill(shape, rule, queue, read)
        queue = filled.waiting
        if not filled.placed:
            return placed, waiting
        placed += [(batch, row, item.at) for row, item in filled.placed]
        waiting.append([item.at for item in queue])


many = st.lists(st.builds(Size, st.integers(1, 12), st.integers(0, 3)), max_size=40)


@given(many, st.sampled_from(["best", "first"]), st.integers(1, 9), st.sampled_from([None, 1, 3]))
def test_packing_loses_nothing_keeps_its_bounds_and_is_fair(sizes, fit, lookahead, limit):
    shape = dataclasses.replace(SHAPE, max_samples_per_row=limit)
    placed, waiting = pack_all(sizes, shape, Packing(fit=fit, lookahead=lookahead))
    assert sorted(at for _, _, at in placed) == list(range(len(sizes)))
    assert all(len(each) <= lookahead and each == sorted(each) for each in waiting)
    rows, groups = {}, {}
    for batch, row, at in placed:
        rows.setdefault((batch, row), []).append(sizes[at])
        groups.setdefault((batch, row // 2), []).append(sizes[at])
    assert all(sum(s.length for s in row) <= 12 for row in rows.values())
    assert all(len(row) <= (limit or 12) for row in rows.values())
    assert all(sum(s.num_views for s in group) <= 3 for group in groups.values())
    if fit == "best":
        longest = math.ceil(lookahead / 2)
        for at in range(len(sizes)):
            assert sum(at in each for each in waiting) <= longest, "waited too long"
            mine = [each for each in placed if each[2] == at]
            assert len(mine) == 1


def test_the_whole_row_before_its_neighbour():
    """Best fit finds the pairs that first fit misses."""
    shape = dataclasses.replace(SHAPE, batch_size=2, tile_groups=1, tiles_per_group=9)
    sizes = [Size(n, 0) for n in (5, 6, 7, 6)]
    placed, _ = pack_all(sizes, shape, Packing(fit="first", lookahead=4))
    assert [(batch, row) for batch, row, _ in placed] == [(0, 0), (0, 0), (0, 1), (1, 0)]
    placed, _ = pack_all(sizes, shape, Packing(fit="best", lookahead=4))
    assert placed == [(0, 0, 0), (0, 0, 2), (0, 1, 1), (0, 1, 3)]


# Choosing the number of tiles -----------------------------------------------------------------------


def llava_like(count=700, seed=0):
    """Sizes as of a LLaVA mixture at 196 tokens a view; the benchmark has a documented one."""
    rng = np.random.default_rng(seed)
    views = rng.choice([1, 3, 4, 5, 7, 10], count, p=[0.1, 0.15, 0.05, 0.6, 0.05, 0.05])
    views[rng.random(count) < 0.06] = 0
    text = np.exp(rng.normal(np.where(views == 0, 6.8, 5.2), 0.8)).astype(int).clip(20, 1500)
    return [Size(int(196 * v + t), int(v)) for v, t in zip(views, text, strict=True)]


def test_measured_tiles_reach_the_goals_with_the_default_rule():
    shape = dataclasses.replace(
        SHAPE, batch_size=8, tile_groups=1, seq_len=4096, tokens_per_view=196
    )
    sizes, rule = llava_like(), Packing()
    found = measure.choose_tiles(sizes, shape, rule)
    assert found.position_fill >= measure.POSITION_GOAL
    assert found.tile_fill >= measure.TILE_GOAL
    fixed = dataclasses.replace(shape, tiles_per_group=found.tiles_per_group)
    assert measure.fill(sizes, fixed, rule) == found
    first = measure.fill(sizes, fixed, Packing(fit="first", lookahead=16))
    assert first.position_fill < found.position_fill and first.tile_fill < found.tile_fill
    for off in (-4, 4):
        other = dataclasses.replace(shape, tiles_per_group=found.tiles_per_group + off)
        assert measure.fill(sizes, other, rule).margin < found.margin


def test_fill_by_hand():
    shape = dataclasses.replace(SHAPE, batch_size=1, tile_groups=1, tiles_per_group=4)
    sizes = [Size(12, 4), Size(6, 3), Size(6, 1), Size(9, 2), Size(12, 4)]
    found = measure.fill(sizes, shape, Packing(fit="first", lookahead=1))
    # Batches of 12, 6 + 6, 9 and 12 positions; the first and the last do not count.
    assert found == measure.Fill(4, 21 / 24, 6 / 8, 2)
    with pytest.raises(ValueError, match=r"num_views=5\) does not fit: seq_len = 12, .* = 4"):
        measure.fill([Size(3, 5)], shape, Packing())
    assert measure.choose_tiles([Size(6, 0)] * 8, shape, Packing()).tiles_per_group == 0


def test_measured_packing_is_what_batches_are_filled_with(tmp_path):
    path = write_dataset(tmp_path, count=40, text_only=(3, 7))
    fields = {"packing": Packing(lookahead=8), "seq_len": 260, "shuffle": False}
    found = make_pipeline(path, **fields).measure_packing(40)
    fields |= {"tiles_per_group": found.tiles_per_group, "epochs": 1, "drop_remainder": False}
    batches = iter(make_pipeline(path, **fields))
    fills = []
    for batch in batches:
        share = (batch["segments"] > 0).mean()
        assert batches.fill["position_fill"] == share
        used = batch["tiles"].any(axis=(2, 3, 4)).mean()
        assert batches.fill["tile_fill"] == pytest.approx(used)
        fills.append((share, used))
    positions, tiles = np.mean(fills[1:-1], axis=0)
    assert found.batches == len(fills) - 2 > 0
    assert (found.position_fill, found.tile_fill) == pytest.approx((positions, tiles))


def test_sizes_for_packing_follow_the_policy_for_long_samples(tmp_path):
    texts = ["Q", "A" * 300]
    image = write_image(tmp_path, "a.png")
    samples = [record("long", *texts), record("short", "<image>\nQ", "A", image=image)]
    path = write_json(tmp_path / "a.json", samples)

    def sizes(policy):
        pipeline = make_pipeline(path, shuffle=False, epochs=1, on_overlong=policy)
        return measure.packed_sizes(pipeline.order(), pipeline.records, pipeline.maker, 9)

    short = sizes("drop")
    assert len(short) == 1 and short[0].num_views == 2
    assert sizes("truncate_text") == [Size(160, 0), *short]


@pytest.mark.parametrize("rule", [None, Packing(), Packing(fit="first"), Packing(lookahead=3)])
def test_a_full_last_batch_is_no_remainder(rule, tmp_path):
    path = write_json(tmp_path / "a.json", [record(f"s{i}", "q", "a" * 20) for i in range(8)])
    fields = {"packing": rule, "epochs": 1, "seq_len": 40}
    assert len(list(make_pipeline(path, **fields))) == 2
    assert len(list(make_pipeline(path, **fields | {"batch_size": 3}))) == 2


def test_a_large_search_keeps_the_bound(monkeypatch):
    shape = BatchShape(
        batch_size=1, seq_len=20, tile_groups=1, tiles_per_group=9, tile_size=28,
        tokens_per_view=4, max_samples_per_row=3,
    )  # fmt: skip
    monkeypatch.setattr(packing, "MOST_BITS", 0)
    sizes = [Size(2, 1), *[Size(1, 0)] * 16, Size(8, 4), Size(9, 4)]
    assert packing.choose(sizes, shape, free=9, rows_left=1) == [0, 17, 18]
