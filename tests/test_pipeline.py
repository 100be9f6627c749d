"""The stream of batches: order, resume, policies, workers, packing, mixtures, measuring."""

import collections
import dataclasses
import itertools
import json

import grain
import numpy as np
import pytest
from data_helpers import (
    SIDE,
    TILING,
    assert_same,
    make_config,
    make_pipeline,
    record,
    take,
    write_dataset,
    write_image,
    write_json,
)

from bluelm_jax import layout, patching, schemes
from bluelm_jax.data import images
from bluelm_jax.data.counters import Counters
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data.sources import InvalidRecordError
from bluelm_jax.data_config import DataConfig, Packing, SourceConfig

PACKED = {"packing": Packing(lookahead=4), "seq_len": 260}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), count=10, text_only=(3, 7))


def prompts_of(pipeline, batch):
    """The text of every sample of a batch, in order of rows and segments."""
    texts = []
    for row, segments in enumerate(batch["segments"]):
        for segment in range(1, segments.max() + 1):
            texts.append(pipeline.tokenizer.decode(batch["tokens"][row][segments == segment]))
    return texts


def names_in_order(pipeline, count):
    order = pipeline.order()
    return [pipeline.records[order[i][0]][order[i][1]]["id"] for i in range(count)]


def test_batches_have_the_contracted_fields(dataset):
    pipeline = make_pipeline(dataset, tile_groups=2)
    batch = next(iter(pipeline))
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
        "tokens": ((4, 160), "int32"),
        "loss_weights": ((4, 160), "float32"),
        "positions": ((4, 160), "int32"),
        "segments": ((4, 160), "int32"),
        "image_index": ((4, 160), "int32"),
        "tiles": ((2, 40, 28, 28, 3), "uint8"),
    }


def test_one_sample_a_row_in_stream_order(dataset):
    pipeline = make_pipeline(dataset, shuffle=False)
    batches = take(iter(pipeline), 3)
    texts = [text for batch in batches for text in prompts_of(pipeline, batch)]
    expected = [f"s{i % 10}" for i in range(12)]
    assert names_in_order(pipeline, 12) == expected
    answers = [pipeline.records[0][i % 10]["conversations"][1]["value"] for i in range(12)]
    assert [text.rsplit("[|AI|]:", 1)[1] for text in texts] == answers


def test_every_image_token_points_at_its_own_view(dataset):
    pipeline = make_pipeline(dataset, shuffle=False, tile_groups=2)
    batch = next(iter(pipeline))
    for row in range(4):
        if row == 3:  # A sample without an image.
            assert (batch["image_index"][row] == layout.TEXT).all()
            continue
        image = images.read_image(dataset.parent / f"0-{row}.png")
        index = batch["image_index"][row]
        views = index[index >= 0][:: SIDE * SIDE] // SIDE**2
        wanted = patching.make_views(image, TILING)
        np.testing.assert_array_equal(batch["tiles"][row // 2][views], wanted)


def test_epochs_are_permutations_and_differ(dataset):
    pipeline = make_pipeline(dataset)
    names = names_in_order(pipeline, 30)
    epochs = [names[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3
    assert names != names_in_order(make_pipeline(dataset, seed=1), 30)
    assert names == names_in_order(make_pipeline(dataset, cache_mb=1), 30)


@pytest.mark.parametrize("fields", [{}, PACKED, {"cache_mb": 4}, {"num_threads": 3}])
def test_resume_gives_identical_batches(dataset, fields):
    straight = iter(make_pipeline(dataset, **fields))
    expected = take(straight, 9)
    for stop in (0, 1, 5):
        first = iter(make_pipeline(dataset, **fields))
        take(first, stop)
        state = json.loads(json.dumps(first.get_state()))
        next(first)  # What comes after the state was taken does not show in it.
        second = iter(make_pipeline(dataset, **fields))
        second.set_state(state)
        assert_same(take(second, 9 - stop), expected[stop:])
        assert second.counters == straight.counters
        first.set_state(state)  # Going back works as well.
        assert_same(take(first, 2), expected[stop : stop + 2])


def test_workers_change_nothing(dataset):
    fields = {"packing": Packing(lookahead=2), "seq_len": 260, "on_invalid_record": "skip"}
    records = [*json.loads(dataset.read_text()), record("bad", "<image>", "A")]
    path = write_json(dataset.parent / "with_bad.json", records)
    alone = iter(make_pipeline(path, **fields))
    shared = iter(make_pipeline(path, num_workers=2, **fields))
    try:
        expected = take(alone, 6)
        assert_same(take(shared, 3), expected[:3])
        state = shared.get_state()
        assert_same(take(shared, 1), expected[3:4])
        shared.set_state(state)
        assert_same(take(shared, 3), expected[3:])
        assert shared.counters == alone.counters
        assert shared.counters.counts["invalid_record"] > 0
    finally:
        shared.close()


def test_grain_checkpoints_the_iterator(dataset, tmp_path):
    first = iter(make_pipeline(dataset))
    take(first, 2)
    grain.checkpoint.CheckpointHandler().save(tmp_path, first)
    expected = take(first, 2)
    second = iter(make_pipeline(dataset))
    grain.checkpoint.CheckpointHandler().restore(tmp_path, second)
    assert_same(take(second, 2), expected)


def test_state_of_another_order_is_refused(dataset):
    state = iter(make_pipeline(dataset)).get_state()
    for fields in ({"seed": 1}, {"shuffle": False}, {"epochs": 2}):
        with pytest.raises(ValueError, match=r"belongs to order .* seed, shuffle, epochs"):
            iter(make_pipeline(dataset, **fields)).set_state(state)
    iter(make_pipeline(dataset, batch_size=2, cache_mb=1)).set_state(state)


def test_broken_off_batch_does_not_show_in_the_state(dataset, monkeypatch):
    pipeline = make_pipeline(dataset, **PACKED)
    batches = iter(pipeline)
    expected = take(iter(make_pipeline(dataset, **PACKED)), 4)
    take(batches, 2)
    calls = itertools.count()
    whole = images.read_image

    def interrupted(*args):
        if next(calls) == 1:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(images, "read_image", interrupted)
    with pytest.raises(KeyboardInterrupt):
        take(batches, 2)
    state = batches.get_state()
    assert state["counters"]["counts"]["batches"] in (2, 3)
    done = state["counters"]["counts"]["batches"]
    other = iter(make_pipeline(dataset, **PACKED))
    other.set_state(state)
    assert_same(take(other, 4 - done), expected[done:])
    assert_same(take(batches, 4 - done), expected[done:])


def test_finite_epochs_and_remainder(dataset):
    fields = {"epochs": 1, "batch_size": 4}
    dropped = list(make_pipeline(dataset, **fields))
    filled = list(make_pipeline(dataset, drop_remainder=False, **fields))
    assert (len(dropped), len(filled)) == (2, 3)
    assert_same(filled[:2], dropped)
    assert filled[2]["segments"].max(axis=1).tolist() == [1, 1, 0, 0]
    assert not filled[2]["loss_weights"][2:].any()
    assert len(list(make_pipeline(dataset, epochs=2, batch_size=5))) == 4


@pytest.mark.parametrize("lookahead", [1, 3, 16])
def test_packing_loses_nothing_and_repeats_nothing(dataset, lookahead):
    fields = {"epochs": 2, "drop_remainder": False, "seq_len": 260, "tiles_per_group": 25}
    pipeline = make_pipeline(dataset, packing=Packing(lookahead=lookahead), **fields)
    batches = iter(pipeline)
    texts = [text for batch in batches for text in prompts_of(pipeline, batch)]
    single = make_pipeline(dataset, epochs=2, drop_remainder=False, tiles_per_group=90)
    expected = [text for batch in single for text in prompts_of(single, batch)]
    assert collections.Counter(texts) == collections.Counter(expected)
    assert batches.counters.counts["samples"] == 20


def test_packing_fills_rows_and_bounds_their_samples(dataset):
    fields = {"epochs": 4, "tiles_per_group": 200, "seq_len": 400, "batch_size": 2}
    used = {}
    for limit in (None, 1, 2):
        packing = Packing(lookahead=8, max_samples_per_row=limit)
        batches = list(make_pipeline(dataset, packing=packing, **fields))
        used[limit] = np.mean([(batch["segments"] > 0).mean() for batch in batches])
        assert max(batch["segments"].max() for batch in batches) <= (limit or 99)
    assert used[1] < used[2] < used[None]
    assert used[None] > 0.8


def test_no_sample_waits_longer_than_its_turn(dataset):
    """Whoever waits is first in line: samples drift by at most the look-ahead and a batch."""
    pipeline = make_pipeline(dataset, packing=Packing(lookahead=3), seq_len=170, shuffle=False)
    batches = iter(pipeline)
    for _ in range(20):
        next(batches)
        state = batches.get_state()
        assert len(state["waiting"]) <= 3
        assert all(state["place"] - place <= 3 + 4 * 4 for place in state["waiting"])
        assert state["waiting"] == sorted(state["waiting"])


def test_full_group_raises_or_defers(dataset):
    fields = {"shuffle": False, "tiles_per_group": 12}
    with pytest.raises(ValueError, match=r"group 0 of a batch needs 1\d tiles, .* = 12.*'s0'.*\("):
        next(iter(make_pipeline(dataset, **fields)))
    fields |= {"on_full_group": "defer", "epochs": 1, "drop_remainder": False}
    pipeline = make_pipeline(dataset, **fields)
    texts = [text for batch in pipeline for text in prompts_of(pipeline, batch)]
    assert len(texts) == len(set(texts)) == 10


def test_counters_name_what_was_left_out(tmp_path):
    write_image(tmp_path, "a.png", 84, 84)
    (tmp_path / "torn.png").write_bytes(b"not an image")
    texts = ("<image>", "A")
    records = [
        record("good", "Q", "A"),
        record("long", "Q" * 300, "A"),
        record("torn", *texts, image="torn.png"),
        record("big", *texts, image="a.png"),
        record("empty", "Q", ""),
    ]
    batches = iter(
        make_pipeline(
            write_json(tmp_path / "a.json", records),
            epochs=2,
            batch_size=1,
            tiles_per_group=4,
            on_overlong="drop",
            on_unreadable_image="skip",
            on_too_many_tiles="skip",
            on_invalid_record="skip",
            max_names=1,
        )
    )
    assert len(list(batches)) == 2
    counts = dict(batches.counters.counts)
    assert counts.pop("supervised") == 4
    assert {k: counts[k] for k in ("overlong", "unreadable_image", "too_many_tiles")} == {
        "overlong": 2,
        "unreadable_image": 2,
        "too_many_tiles": 2,
    }
    assert (counts["invalid_record"], counts["samples"], counts["batches"]) == (2, 2, 2)
    (name,) = batches.counters.names["too_many_tiles"]
    assert "'big'" in name and "a.json[3]" in name and "tiles_per_group = 4" in name
    assert "overlong 2" in batches.counters.summary()


def test_record_that_is_no_json_follows_the_policy(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(record("a", "Q", "A")) + '\n{"id": \n')
    fields = {"epochs": 1, "batch_size": 1, "shuffle": False}
    with pytest.raises(InvalidRecordError, match=r"a\.jsonl\[1\] .*not valid JSON"):
        list(make_pipeline(path, **fields))
    batches = iter(make_pipeline(path, on_invalid_record="skip", **fields))
    assert len(list(batches)) == batches.counters.counts["invalid_record"] == 1


def test_all_samples_left_out_is_an_error(tmp_path):
    path = write_json(tmp_path / "a.json", [record("e", "Q", "")])
    with pytest.raises(ValueError, match=r"every sample is left out; .*'e'"):
        next(iter(make_pipeline(path, on_invalid_record="skip")))


def test_cache_decodes_once_within_its_bound(dataset, monkeypatch):
    calls = collections.Counter()
    whole = images.read_image

    def counted(path, *args):
        calls[path] += 1
        return whole(path, *args)

    monkeypatch.setattr(images, "read_image", counted)
    expected = take(iter(make_pipeline(dataset)), 10)
    assert set(calls.values()) == {4}
    calls.clear()
    assert_same(take(iter(make_pipeline(dataset, cache_mb=8)), 10), expected)
    assert len(calls) == 8 and set(calls.values()) == {1}
    calls.clear()
    pipeline = make_pipeline(dataset, cache_mb=1)
    pipeline._prepare._room = 20_000  # Room for a few of the samples only.
    assert_same(take(iter(pipeline), 10), expected)
    assert 1 in calls.values() and 4 in calls.values()
    held = sum(v["tiles"].nbytes for v in pipeline._prepare._cache.values())
    assert 0 < held <= 20_000


def mixture(folder, weights):
    sources = []
    for i, weight in enumerate(weights):
        path = write_dataset(folder, count=4 + i, name=f"{i}.json", text_only=range(9), seed=i)
        sources.append(SourceConfig(path=str(path), weight=weight))
    return tuple(sources)


def test_mixture_follows_the_weights(tmp_path):
    pipeline = make_pipeline(mixture(tmp_path, (3.0, 1.0)))
    order = pipeline.order()
    keys = [order[i] for i in range(200)]
    counts = collections.Counter(source for source, _ in keys)
    assert counts == {0: 150, 1: 50}
    for source, size in ((0, 4), (1, 5)):
        mine = [index for each, index in keys if each == source]
        assert sorted(mine[:size]) == list(range(size))
    batches = iter(pipeline)
    take(batches, 3)
    state = batches.get_state()
    expected = take(batches, 3)
    other = iter(make_pipeline(mixture(tmp_path, (3.0, 1.0))))
    other.set_state(state)
    assert_same(take(other, 3), expected)
    with pytest.raises(ValueError, match="belongs to order"):
        iter(make_pipeline(mixture(tmp_path, (2.0, 1.0)))).set_state(state)


def test_each_source_may_have_its_template(tmp_path):
    sources = mixture(tmp_path, (1.0, 1.0))
    sources = (sources[0], dataclasses.replace(sources[1], template="plain"))
    pipeline = make_pipeline(sources, shuffle=False)
    texts = prompts_of(pipeline, next(iter(pipeline)))
    assert [text.startswith("[|Human|]:") for text in texts] == [True, False] * 2


def test_hosts_share_one_order(dataset):
    config = make_config(dataset, batch_size=2)
    whole = Pipeline(config, side=SIDE).order()
    for host in range(3):
        part = Pipeline(config, side=SIDE, process_index=host, process_count=3).order()
        assert [part[i] for i in range(20)] == [whole[host + 3 * i] for i in range(20)]
    with pytest.raises(ValueError, match=r"process_index = 3: must be in 0\.\.2"):
        Pipeline(config, side=SIDE, process_index=3, process_count=3)


SCHEMES = [schemes.Relaxed(), schemes.LlavaNext(), schemes.InternVL15(), schemes.Fixed()]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
def test_measured_sizes_are_exact(dataset, scheme):
    tiling = dataclasses.replace(TILING, scheme=scheme)
    fields = {"tiling": tiling, "tile_groups": 2, "batch_size": 4}
    loose = dataclasses.replace(make_config(dataset), **fields)
    found = Pipeline(loose, side=SIDE).measure(num_batches=8)
    exact = {"seq_len": found.max_length, "tiles_per_group": found.tiles_per_group}
    batches = take(iter(Pipeline(dataclasses.replace(loose, **exact), side=SIDE)), 8)
    assert max((batch["segments"] > 0).sum(axis=1).max() for batch in batches) == found.max_length
    used = [(batch["tiles"].any(axis=(2, 3, 4))).sum(axis=1).max() for batch in batches]
    assert max(used) == found.tiles_per_group
    for field in exact:
        tight = dataclasses.replace(loose, **(exact | {field: exact[field] - 1}))
        with pytest.raises(ValueError, match=field):
            take(iter(Pipeline(tight, side=SIDE)), 8)
    same = [pipeline_keys(dataclasses.replace(loose, **exact)), pipeline_keys(make_config(dataset))]
    assert same[0] == same[1]


def pipeline_keys(config):
    order = Pipeline(config, side=SIDE).order()
    return [order[i] for i in range(32)]


def test_measure_needs_a_length(dataset):
    with pytest.raises(ValueError, match="needs finite epochs"):
        make_pipeline(dataset).measure()
    found = make_pipeline(dataset, epochs=1).measure()
    assert found.max_views >= found.mean_views > 0 and found.max_length >= found.mean_length


def test_unknown_and_empty_files(tmp_path):
    with pytest.raises(ValueError, match=r"sources = \(\): must name at least one file"):
        Pipeline(dataclasses.replace(make_config("a.json"), sources=()), side=SIDE)
    with pytest.raises(ValueError, match=r"none\.json: no such file"):
        make_pipeline(tmp_path / "none.json")
    with pytest.raises(ValueError, match=r"a\.json: the file holds no record"):
        make_pipeline(write_json(tmp_path / "a.json", []))


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("batch_size", 0, "> 0"),
        ("seq_len", -1, "> 0"),
        ("tile_groups", 3, "a divisor of batch_size = 4"),
        ("seed", 2**32, r"in 0\.\.2\*\*32 - 1"),
        ("epochs", 0, "None or > 0"),
        ("num_workers", -1, ">= 0"),
        ("max_aspect_ratio", 0.5, ">= 1"),
    ],
)
def test_config_names_value_and_bound(field, value, bound):
    good = make_config("a.json")
    with pytest.raises(ValueError, match=rf"DataConfig\.{field} = .*: must be {bound}"):
        dataclasses.replace(good, **{field: value})


POLICIES = [f.name for f in dataclasses.fields(DataConfig) if f.name.startswith("on_")]


@pytest.mark.parametrize("field", POLICIES)
def test_config_refuses_unknown_policies(field):
    assert len(POLICIES) == 5
    with pytest.raises((ValueError, TypeError)):
        make_config("a.json", **{field: "ignore"})


def test_counters_keep_each_name_once():
    counters = Counters(max_names=2)
    for name in ("a", "a", "b", "a", "c"):
        counters.add("overlong", name)
    assert counters.counts == {"overlong": 5} and counters.names == {"overlong": ["a", "b"]}
    old = {"counts": {"overlong": 3}, "names": {"overlong": ["a", "a", "b"]}}
    counters.restore(old)
    assert counters.state() == {"counts": {"overlong": 3}, "names": {"overlong": ["a", "b"]}}


def test_what_a_policy_raises_for_says_how_to_leave_it_out(tmp_path):
    samples = [record("a", "Q", "A" * 200)]
    pipeline = make_pipeline(write_json(tmp_path / "a.json", samples), seq_len=64)
    advice = r"sample 'a'.*seq_len = 64 \(DataConfig\.on_overlong = 'drop' leaves .*validate_data"
    with pytest.raises(ValueError, match=advice):
        next(iter(pipeline))
    bad = make_pipeline(write_json(tmp_path / "b.json", [record("b", "Q", "")]), epochs=1)
    with pytest.raises(ValueError, match=r"sample 'b'.*DataConfig\.on_invalid_record = 'skip'"):
        bad.measure()


def test_counters_report_names():
    counters = Counters(max_names=1)
    counters.add("samples", count=3)
    counters.add("unreadable_image", "sample 'a': a.png: empty")
    counters.add("unreadable_image", "sample 'b': b.png: empty")
    assert counters.report().splitlines() == [
        "samples 3, unreadable_image 2",
        "  unreadable_image: sample 'a': a.png: empty",
    ]
