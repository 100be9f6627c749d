"""Reading one batch ahead: what is asked for when, and that states and errors stay in their place."""

import jax
import numpy as np
import pytest
from data_helpers import assert_same, make_pipeline, take, write_dataset
from model_helpers import TINY, make_run

from bluelm_jax import sharding, train
from bluelm_jax.config import MeshConfig
from bluelm_jax.data_config import Packing
from bluelm_jax.prefetch import DevicePrefetch

PACKED = {"packing": Packing(lookahead=4), "seq_len": 260}


class Numbers:
    """A stand-in for the data: batch n is {"n": n}; asks are noted, some fail."""

    def __init__(self, end=4, fails=None):
        self.at, self.end, self.fails, self.asked = 0, end, fails, []

    def __next__(self):
        self.asked.append(self.at)
        if self.at == self.fails:
            raise RuntimeError("a damaged file")
        if self.at == self.end:
            raise StopIteration
        self.at += 1
        self.fill = {"position_fill": self.at / 10}
        return {"n": self.at - 1}

    def get_state(self):
        return {"place": self.at}


def test_the_state_is_that_of_the_batch_that_was_taken():
    numbers = Numbers()
    ahead = DevicePrefetch(numbers, lambda arrays: arrays["n"])
    for n in range(4):
        fetched = ahead.take()
        ahead.fetch()
        ahead.fetch()  # Only one is read ahead.
        assert numbers.at == min(n + 2, 4)
        assert (fetched.batch, fetched.state) == (n, {"place": n + 1})
        assert fetched.fill == {"position_fill": (n + 1) / 10}
    with pytest.raises(StopIteration):
        ahead.take()


def test_an_error_waits_for_its_batch():
    ahead = DevicePrefetch(Numbers(fails=1), lambda arrays: arrays["n"])
    first = ahead.take()
    ahead.fetch()
    assert first.state == {"place": 1}
    with pytest.raises(RuntimeError, match="a damaged file"):
        ahead.take()


def test_ctrl_c_is_not_kept_for_later():
    def put(arrays):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        DevicePrefetch(Numbers(), put).fetch()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data"), count=10, text_only=(3, 7))


def test_batches_on_devices_are_those_of_the_pipeline(dataset):
    """In order, split over all devices, each with the state that continues right after it."""
    mesh = sharding.make_mesh(MeshConfig())
    fields = {**PACKED, "batch_size": 8, "tile_groups": 8}
    expected = take(iter(make_pipeline(dataset, **fields)), 4)
    batches = iter(make_pipeline(dataset, **fields))
    ahead = DevicePrefetch(batches, lambda arrays: train.device_batch(arrays, mesh))
    for n, want in enumerate(expected[:3]):
        fetched = ahead.take()
        ahead.fetch()
        for name, value in want.items():
            got = getattr(fetched.batch, name)
            np.testing.assert_array_equal(np.asarray(got), value)
            assert len(got.sharding.device_set) == len(jax.devices()) == 8
            assert got.addressable_shards[0].data.shape[0] == 1
        other = iter(make_pipeline(dataset, **fields))
        other.set_state(fetched.state)
        assert_same(take(other, 1), expected[n + 1 : n + 2])


def test_the_next_batch_is_asked_for_before_a_step_is_waited_for(dataset, tmp_path, monkeypatch):
    """Between starting a step and reading its metrics, the loop puts the next batch on devices."""
    events = []

    class Metric:
        def __init__(self, step):
            self.step = step

        def __float__(self):
            events.append(("wait", self.step))
            return 1.0

    real_put, real_jit = train.device_batch, jax.jit

    def put(*args):
        events.append(("put", len([e for e in events if e[0] == "put"]) + 1))
        return real_put(*args)

    def jit(function, **options):
        if "donate_argnums" not in options:
            return real_jit(function, **options)

        def step(state, batch):
            number = int(state.step) + 1
            events.append(("start", number))
            return state.replace(step=state.step + 1), {"loss": Metric(number)}

        return step

    monkeypatch.setattr(train, "device_batch", put)
    monkeypatch.setattr(train.jax, "jit", jit)
    monkeypatch.setattr(train, "_check_finite", lambda step, metrics: None)
    run = make_run(
        dataset, model=TINY, steps=3, data={"seq_len": 96, "batch_size": 8, "tile_groups": 8}
    )
    train.train(run, tmp_path)
    assert events == [
        ("put", 1), ("start", 1), ("put", 2), ("wait", 1),
        ("start", 2), ("put", 3), ("wait", 2), ("start", 3), ("wait", 3),
    ]  # fmt: skip
