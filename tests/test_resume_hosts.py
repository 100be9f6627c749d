"""Checkpoints of N hosts continued on M: every sample comes exactly as often as without a stop."""

import collections
import json

import pytest
from data_helpers import SIDE, make_config, make_pipeline, record, take, write_json
from test_pipeline import prompts_of

from bluelm_jax import data_states
from bluelm_jax.data.host_states import merge_states
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import Packing, SourceConfig

EPOCHS = 3
FIELDS = {
    "seq_len": 120,
    "batch_size": 2,
    "tiles_per_group": 0,
    "epochs": EPOCHS,
    "drop_remainder": False,
}


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """61 samples of lengths 20 to 110, so that hosts use up different numbers of them."""
    samples = [record(f"s{i}", f"{i}?", "a" * (1 + (37 * i) % 90)) for i in range(61)]
    return write_json(tmp_path_factory.mktemp("texts") / "a.json", samples)


def make_hosts(path, count, states=None, **fields):
    """The pipelines of `count` hosts and their iterators, at the given states."""
    config = make_config(path, **(FIELDS | {"packing": Packing(lookahead=5)} | fields))
    pipelines = [
        Pipeline(config, side=SIDE, process_index=i, process_count=count) for i in range(count)
    ]
    iterators = [iter(pipeline) for pipeline in pipelines]
    for iterator, state in zip(iterators, states or [], strict=False):
        iterator.set_state(json.loads(json.dumps(state)))
    return list(zip(pipelines, iterators, strict=True))


def read(hosts, batches=None):
    """Texts of the samples in the next `batches` of each host; None reads to the end."""
    found = collections.Counter()
    for pipeline, iterator in hosts:
        some = list(iterator) if batches is None else take(iterator, batches)
        for batch in some:
            found.update(prompts_of(pipeline, batch))
    return found


def states_of(hosts):
    return [iterator.get_state() for _, iterator in hosts]


def expected(path):
    alone = make_hosts(path, 1)
    return read(alone)


@pytest.mark.parametrize("counts", [(1, 2), (2, 1), (2, 3), (3, 2), (4, 1, 3), (2, 4, 3, 1)])
@pytest.mark.parametrize("fit", ["best", "first"])
def test_nothing_is_lost_and_nothing_repeated(texts, counts, fit):
    fields = {"packing": Packing(fit=fit, lookahead=5)}
    hosts = make_hosts(texts, counts[0], **fields)
    seen = read(hosts, 3)
    for count in counts[1:]:
        places = {iterator.get_state()["place"] for _, iterator in hosts}
        if len(hosts) > 1:
            assert len(places) > 1, "hosts that are equally far prove little"
        hosts = make_hosts(texts, count, merge_states(states_of(hosts), count), **fields)
        seen += read(hosts, 2)
    seen += read(hosts)
    assert seen == expected(texts)
    assert set(seen.values()) == {EPOCHS} and len(seen) == 61


def test_the_same_number_of_hosts_continues_exactly(texts):
    hosts = make_hosts(texts, 3)
    read(hosts, 2)
    states = states_of(hosts)
    assert merge_states(states[::-1], 3) == states
    again = make_hosts(texts, 3, states)
    assert [iterator.get_state() for _, iterator in again] == states
    assert read(again) == read(hosts)


def test_samples_that_were_left_out_stay_counted(tmp_path):
    samples = [record(f"s{i}", f"{i}?", "a" * (5 + i)) for i in range(20)]
    samples[3] = record("bad", "q", "")
    samples[13] = record("worse", "q", "")
    path = write_json(tmp_path / "a.json", samples)
    fields = {"epochs": 1, "on_invalid_record": "skip"}
    hosts = make_hosts(path, 2, **fields)
    read(hosts, 1)
    (merged,) = merge_states(states_of(hosts), 1)
    hosts = make_hosts(path, 1, [merged], **fields)
    read(hosts)
    counters = hosts[0][1].counters
    assert counters.counts["invalid_record"] == 2 and counters.counts["samples"] == 18
    assert sorted(name.split("'")[1] for name in counters.names["invalid_record"]) == [
        "bad", "worse"
    ]  # fmt: skip
    two = merge_states([merged], 2)
    assert two[1]["counters"] == {"counts": {}, "names": {}}


def test_a_mixture_over_hosts(tmp_path):
    paths = []
    for name, size in (("a", 40), ("b", 20)):
        samples = [
            record(f"{name}{i}", f"{name}{i}?", "a" * (1 + (7 * i) % 60)) for i in range(size)
        ]
        paths.append(write_json(tmp_path / f"{name}.json", samples))
    sources = tuple(
        SourceConfig(path=str(p), weight=w) for p, w in zip(paths, (2.0, 1.0), strict=True)
    )
    hosts = make_hosts(sources, 2)
    seen = read(hosts, 2)
    hosts = make_hosts(sources, 3, merge_states(states_of(hosts), 3))
    assert seen + read(hosts) == expected(sources)


def test_what_no_longer_matters_is_dropped(texts):
    hosts = make_hosts(texts, 2)
    read(hosts[:1], 5)
    hosts = make_hosts(texts, 3, merge_states(states_of(hosts), 3))
    assert all(iterator.get_state()["taken"] for _, iterator in hosts)
    read(hosts, 6)
    again = make_hosts(texts, 3, states_of(hosts))
    assert not any(iterator.get_state()["taken"] for _, iterator in again)


def test_states_that_do_not_belong_together(texts):
    hosts = make_hosts(texts, 2)
    states = states_of(hosts)
    with pytest.raises(ValueError, match=r"hosts 1 of 2: must be one of each"):
        merge_states(states[1:], 1)
    with pytest.raises(ValueError, match=r"hosts 0 of 2, 0 of 2: must be one of each"):
        merge_states([states[0], states[0]], 3)
    other = make_hosts(texts, 2, seed=1)[1][1].get_state()
    with pytest.raises(ValueError, match=r"belong to different orders: \w+, \w+"):
        merge_states([states[0], other], 3)
    with pytest.raises(
        ValueError, match=r"state is of host 0 of 2, this is host 0 of 1: use merge"
    ):
        iter(make_pipeline(texts, **FIELDS)).set_state(states[0])


def test_one_process_keeps_its_state_in_a_checkpoint(texts):
    ((_, iterator),) = make_hosts(texts, 1)
    take(iterator, 2)
    state = iterator.get_state()
    saved = json.loads(json.dumps(data_states.of_all(state)))
    assert saved == {"hosts": [state]} and data_states.own(saved) == state


def test_a_checkpoint_of_two_hosts_on_one(texts):
    hosts = make_hosts(texts, 2)
    seen = read(hosts, 2)
    own = data_states.own({"hosts": states_of(hosts)})
    assert own["host"] == [0, 1]
    assert seen + read(make_hosts(texts, 1, [own])) == expected(texts)


def test_other_records_of_the_same_number_are_refused(tmp_path):
    def batches(name, prefix):
        records = [record(f"{prefix}{i}", "q", "a") for i in range(9)]
        return iter(make_pipeline(write_json(tmp_path / name, records)))

    state = batches("a.json", "a").get_state()
    batches("b.json", "a").set_state(state)
    other = batches("a.json", "b")
    with pytest.raises(ValueError, match="taken from other records"):
        other.set_state(state)
    other.set_state(state | {"order": state["order"].partition("_")[0]})


def test_a_long_gap_is_no_error_and_no_sample_for_a_host_is(tmp_path):
    good = write_json(tmp_path / "g.json", [record("g", "q", "a")])
    bad = write_json(tmp_path / "b.json", [record(f"b{i}", "q", "") for i in range(3)])
    fields = {"on_invalid_record": "skip", "batch_size": 1, "shuffle": False}
    mixed = (SourceConfig(path=str(good)), SourceConfig(path=str(bad), weight=40))
    take(iter(make_pipeline(mixed, **fields)), 3)
    two = write_json(tmp_path / "2.json", [record("g", "q", "a"), record("b", "q", "")])
    second = Pipeline(make_config(two, **fields), side=SIDE, process_index=1, process_count=2)
    with pytest.raises(ValueError, match="every sample of host 1 of 2 is left out"):
        next(iter(second))
    with pytest.raises(ValueError, match=r"no sample of .* is left"):
        second.measure(2)


def test_a_record_without_that_answer_follows_the_policy(tmp_path):
    records = [record("one", "q", "a"), record("two", "q", "a", "r", "b")]
    path = write_json(tmp_path / "a.json", records)
    with pytest.raises(ValueError, match=r"sample 'one' .*no answer number 1, it has 1"):
        list(make_pipeline(path).prompts(turn=1))
    (kept,) = make_pipeline(path, on_invalid_record="skip").prompts(turn=1)
    assert kept.reference == "b"
