"""Mixtures by weight and by repeat: what each source gives, exact resume, workers, hosts, the table."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest
from data_helpers import SIDE, TILING, assert_same, make_config, take, write_dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from bluelm_jax import schemes
from bluelm_jax.data import mixture
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import Packing, SourceConfig


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    return [
        str(write_dataset(folder, count=4 + 2 * i, name=f"{'abc'[i]}.json", text_only=(1,), seed=i))
        for i in range(3)
    ]


def sources(paths, *fields):
    return tuple(SourceConfig(path=path, **each) for path, each in zip(paths, fields, strict=False))


def repeats(paths, *values):
    return sources(paths, *({"repeat": value} for value in values))


def keys(config, **options):
    order = Pipeline(config, side=SIDE, **options).order()
    return [order[i] for i in range(len(order))]


def config_of(chosen, **fields):
    return make_config(chosen, **fields)


# Every kind of mixture that a config can name.
KINDS = {
    "weights": [{"weight": 3.0}, {"weight": 1.0}],
    "repeats": [{"repeat": 2.0}, {"repeat": 0.5}, {"repeat": 1.0}],
    "fractions": [{"repeat": 1.3}, {"repeat": 0.4, "random": 5}],
    "subsets": [{"first": 3}, {"random": 4, "weight": 2.0}],
    "one repeat": [{"repeat": 1.5}],
    "template and tiling": [
        {"template": "plain"},
        {"tiling": dataclasses.replace(TILING, scheme=schemes.Fixed())},
    ],
}
kinds = pytest.mark.parametrize("fields", KINDS.values(), ids=KINDS.keys())


def test_one_epoch_is_the_union(paths):
    found = collections.Counter(keys(config_of(repeats(paths, 1, 2, 3), epochs=1)))
    expected = {(s, i): s + 1 for s, count in enumerate((4, 6, 8)) for i in range(count)}
    assert found == expected


@settings(derandomize=True, deadline=None, max_examples=30)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.2, 3)), min_size=1, max_size=3),
    st.booleans(),
    st.integers(1, 4),
)
def test_no_record_comes_twice_more_than_another(parts, shuffle, epochs):
    chosen = tuple(SourceConfig(path="x", repeat=repeat) for _, repeat in parts)
    config = config_of(chosen, shuffle=shuffle, epochs=epochs)
    counts = [count for count, _ in parts]
    sizes = [int(np.floor(repeat * count + 0.5)) for count, repeat in parts]
    if 0 in sizes:
        with pytest.raises(ValueError, match=r"x: repeat = .* of \d+ records is none"):
            mixture.order(config, counts)
        return
    order = mixture.order(config, counts)
    found = [order[i] for i in range(len(order))]
    assert len(found) == epochs * sum(sizes)
    for start in range(0, len(found), sum(sizes)):
        epoch = collections.Counter(s for s, _ in found[start : start + sum(sizes)])
        assert epoch == dict(enumerate(sizes))
    for source, count in enumerate(counts):
        times = collections.Counter(index for s, index in found if s == source)
        each = [times[index] for index in range(count)]
        assert sum(each) == epochs * sizes[source] and max(each) - min(each) <= 1


def test_every_epoch_has_each_sources_share(paths):
    found = keys(config_of(repeats(paths, 0.5, 1.5), epochs=4))
    assert len(found) == 4 * (2 + 9)
    for start in range(0, len(found), 11):
        epoch = collections.Counter(source for source, _ in found[start : start + 11])
        assert epoch == {0: 2, 1: 9}
    halves = [
        {i for s, i in found[start : start + 11] if s == 0} for start in range(0, len(found), 11)
    ]
    assert halves[0] | halves[1] == {0, 1, 2, 3} == halves[2] | halves[3]


def test_epochs_are_shuffled_anew_and_together(paths):
    found = keys(config_of(repeats(paths, 1, 1), epochs=3))
    epochs = [found[start : start + 10] for start in range(0, 30, 10)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [s for s, _ in epochs[0]] not in ([0] * 4 + [1] * 6, [1] * 6 + [0] * 4)
    in_order = keys(config_of(repeats(paths, 1, 1), epochs=2, shuffle=False))
    assert in_order == 2 * ([(0, i) for i in range(4)] + [(1, i) for i in range(6)])
    assert keys(config_of(repeats(paths, 1, 1), epochs=3)) == found
    assert keys(config_of(repeats(paths, 1, 1), epochs=3, seed=1)) != found


def test_endless_mixture_goes_on_as_the_finite_one(paths):
    endless = Pipeline(config_of(repeats(paths, 1.5, 1)), side=SIDE).order()
    finite = keys(config_of(repeats(paths, 1.5, 1), epochs=3))
    assert [endless[i] for i in range(36)] == finite


@kinds
@pytest.mark.parametrize("packed", [False, True])
def test_resume_with_other_workers_is_exact(paths, fields, packed):
    chosen = sources(paths, *fields)
    options = {"packing": Packing(lookahead=3) if packed else None, "batch_size": 2}
    whole = take(iter(Pipeline(config_of(chosen, **options), side=SIDE)), 9)
    for stop in (4,) if packed else (1, 4):
        batches = iter(Pipeline(config_of(chosen, **options), side=SIDE))
        assert_same(take(batches, stop), whole[:stop])
        again = iter(Pipeline(config_of(chosen, **options, num_threads=2), side=SIDE))
        again.set_state(batches.get_state())
        assert_same(take(again, 9 - stop), whole[stop:])
        again.close()


@pytest.mark.parametrize("name", ["repeats", "subsets"])
def test_worker_processes_change_nothing(paths, name):
    chosen = sources(paths, *KINDS[name])
    expected = take(iter(Pipeline(config_of(chosen), side=SIDE)), 5)
    batches = iter(Pipeline(config_of(chosen, num_workers=2), side=SIDE))
    assert_same(take(batches, 2), expected[:2])
    state = batches.get_state()
    batches.close()
    again = iter(Pipeline(config_of(chosen, num_workers=1), side=SIDE))
    again.set_state(state)
    assert_same(take(again, 3), expected[2:])
    again.close()


@kinds
def test_hosts_share_one_order(paths, fields):
    chosen = config_of(sources(paths, *fields), epochs=2)
    whole = keys(chosen)
    for count in (2, 3):
        parts = [keys(chosen, process_index=host, process_count=count) for host in range(count)]
        assert sorted(itertools.chain(*parts)) == sorted(whole)
        assert all(part == whole[host::count] for host, part in enumerate(parts))


def test_states_of_another_mixture_are_refused(paths):
    base = repeats(paths, 1, 2)
    state = iter(Pipeline(config_of(base), side=SIDE)).get_state()
    others = [
        repeats(paths, 1, 3),
        (base[0], dataclasses.replace(base[1], first=6)),
        (base[0], dataclasses.replace(base[1], random=6)),
        sources(paths, {}, {}),
    ]
    for other in others:
        with pytest.raises(ValueError, match="belongs to order"):
            iter(Pipeline(config_of(other), side=SIDE)).set_state(state)
    named = (dataclasses.replace(base[0], name="x"), base[1])
    iter(Pipeline(config_of(named), side=SIDE)).set_state(state)


def test_random_subset_follows_the_seed_in_training(paths):
    chosen = (SourceConfig(path=paths[2], random=3),)
    pipelines = [Pipeline(config_of(chosen, seed=s), side=SIDE) for s in (0, 0, 1, 2)]
    drawn = [tuple(p.records[0][i]["id"] for i in range(3)) for p in pipelines]
    assert drawn[0] == drawn[1] and len(set(drawn)) > 1


def test_tiling_of_a_source_decides_its_views(paths):
    fixed = dataclasses.replace(TILING, scheme=schemes.Fixed())
    chosen = sources(paths, {}, {"tiling": fixed})
    pipeline = Pipeline(config_of(chosen, epochs=1, shuffle=False), side=SIDE)
    examples = pipeline.examples()
    views = [[], []]
    for place in range(len(pipeline.order())):
        views[pipeline.order()[place][0]].append(len(examples[place]["tiles"]))
    assert max(views[0]) > 1 and set(views[1]) == {0, 1}
    measured = pipeline.measure()
    assert measured.max_views == max(views[0])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([{"repeat": 2.0}, {}], r"'a' has a repeat and 'b' has none; mix by repeat .* not both"),
        ([{"repeat": 2.0, "weight": 3.0}], r"repeat = 2\.0: must be None beside weight = 3\.0"),
        ([{"repeat": 0.0}], r"repeat = 0\.0: must be None or > 0"),
        ([{"first": 0}], r"first = 0: must be None or > 0"),
        ([{"first": 2, "random": 2}], r"random = 2: must be None beside first = 2"),
        ([{"tiling": schemes.Tiling(scheme=schemes.Fixed(), tile_size=56)}],
         r"tiling of 'a': tile_size = 56, but DataConfig\.tiling has 28"),
    ],
)  # fmt: skip
def test_contradictions_are_refused(paths, fields, message):
    with pytest.raises(ValueError, match=message):
        config_of(sources(paths, *fields))


def test_epochs_too_large_to_shuffle_are_refused():
    config = config_of((SourceConfig(path="x", repeat=2.0),))
    with pytest.raises(ValueError, match=r"an epoch of 4294967296 samples; .* fewer than 2\^32"):
        mixture.order(config, [2**31])
    assert len(mixture.order(config, [2**31 - 1])) > 2**32


def test_names():
    assert SourceConfig(path="data/train.v2.json").label == "train"
    assert SourceConfig(path="data/shards/").label == "shards"
    assert SourceConfig(path="data/x.json", name="mine").label == "mine"
    assert SourceConfig(path="data/shards/").folder == "data"
    assert SourceConfig(path="x.json").folder == ""


def test_table_by_weight(paths):
    chosen = sources(paths, {"weight": 3.0, "name": "captions"}, {"first": 2})
    lines = mixture.table(config_of(chosen), 10, 8).splitlines()
    assert lines[0] == "data: 2 sources, mixed by weight"
    assert lines[1].split() == ["source", "records", "used", "weight", "share", "samples", "epochs"]
    assert lines[2].split() == ["captions", "4", "4", "3", "75.0", "%", "60", "15.00"]
    assert lines[3].split() == ["b", "6", "2", "1", "25.0", "%", "20", "10.00"]


def test_table_by_repeat_and_finite_epochs(paths):
    config = config_of(repeats(paths, 0.5, 3), epochs=2)
    lines = mixture.table(config, 1000, 8).splitlines()
    assert lines[0] == "data: 2 sources, mixed by repeat"
    assert lines[2].split() == ["a", "4", "4", "0.5", "10.0", "%", "4", "1.00"]
    assert lines[3].split() == ["b", "6", "6", "3", "90.0", "%", "36", "6.00"]


def test_table_without_files(paths, tmp_path):
    (tmp_path / "broken.json").write_text("[1, ")
    chosen = sources([paths[0], "none/b.json", str(tmp_path / "broken.json")], {}, {}, {})
    lines = mixture.table(config_of(chosen), 5, 6).splitlines()
    assert lines[2].split() == ["a", "4", "4", "1", "33.3", "%", "10", "2.50"]
    assert lines[3].split() == ["b", "not", "found", "-", "1", "33.3", "%", "10", "-"]
    assert lines[4].split() == ["broken", "unusable", "-", "1", "33.3", "%", "10", "-"]
    assert lines[5].split(maxsplit=1) == ["b:", "none/b.json: no such file"]
    assert "broken.json: the array is not closed" in lines[6]
    mixed = [dataclasses.replace(source, repeat=1.0) for source in chosen]
    lines = mixture.table(config_of(tuple(mixed)), 5, 6).splitlines()
    assert lines[2].split() == ["a", "4", "4", "1", "-", "%", "-", "-"]


def test_no_sample_left_is_named(tmp_path):
    path = write_dataset(tmp_path, count=2, text_only=(0, 1))
    path.write_text(path.read_text().replace("gpt", "human"))
    config = config_of((SourceConfig(path=str(path)),), on_invalid_record="skip")
    with pytest.raises(ValueError, match=r"no sample of .*train\.json is left by the policies"):
        Pipeline(config, side=SIDE).measure(2)


@pytest.mark.parametrize(
    ("weights", "counts", "length"),
    [((1, 3), (100, 50), 67), ((558, 96), (558, 96), 654), ((1, 1), (5, 5), 10)],
)
def test_a_mixture_by_weight_ends_at_the_turn_of_a_source_that_is_through(weights, counts, length):
    named = tuple(SourceConfig(path=f"/{i}", weight=w) for i, w in enumerate(weights))
    finite = mixture.order(config_of(named, epochs=1), counts)
    endless = mixture.order(config_of(named, epochs=None), counts)
    given = [0] * len(counts)
    for place in range(length):
        given[finite[place][0]] += 1
    assert len(finite) == length and any(g == n for g, n in zip(given, counts, strict=True))
    assert given[endless[length][0]] == counts[endless[length][0]]
