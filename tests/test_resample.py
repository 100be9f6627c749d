"""Bytes of both backends against Pillow's own resize."""

import concurrent.futures
import functools
import importlib.util
import subprocess
import sys
import threading

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

import bluelm_jax
from bluelm_jax import patching, resample
from bluelm_jax.schemes import LlavaNext, Tiling

needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="Numba is not installed"
)
BACKENDS = [pytest.param("numba", marks=needs_numba), "pillow"]


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """Runs a test under each backend, whatever is installed."""
    monkeypatch.setattr(resample, "backend", lambda: request.param)
    return request.param


@pytest.fixture
def fresh_import(monkeypatch):
    """Lets `backend` decide anew, and forgets that decision afterwards."""
    for name in ("numba", "bluelm_jax.resample_numba"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.delattr(bluelm_jax, "resample_numba", raising=False)
    for decision in (resample._backend, resample._order):
        decision.cache_clear()
    yield
    resample._backend.cache_clear()
    resample._order.cache_clear()


@functools.cache
def noise(width, height):
    """Noise of full contrast, whose overshoot is clipped at both ends."""
    rng = np.random.default_rng(width * 10007 + height)
    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    pixels[rng.random((height, width)) < 0.5] //= 255
    pixels[rng.random((height, width)) < 0.3] = 255
    pixels.flags.writeable = False
    return pixels


def assert_as_pillow(size, new_size, filter_="bicubic"):
    pixels = noise(*size)
    expected = Image.fromarray(pixels).resize(new_size, Image.Resampling[filter_.upper()])
    resized = resample.resize(pixels, new_size, filter_)
    assert resized.dtype == np.uint8 and resized.shape == (*new_size[::-1], 3)
    name = f"{filter_}, {size} -> {new_size}"
    np.testing.assert_array_equal(resized, np.asarray(expected), err_msg=name)


sides = st.one_of(st.integers(1, 9), st.integers(1, 200))
sizes = st.tuples(sides, sides)


@needs_numba
@given(size=sizes, new_size=sizes)
@example(size=(1, 1), new_size=(1, 1))
@example(size=(1, 1), new_size=(70, 90))
@example(size=(150, 110), new_size=(1, 1))
@example(size=(40, 30), new_size=(40, 30))
@example(size=(40, 30), new_size=(40, 77))
@example(size=(40, 30), new_size=(11, 30))
@example(size=(64, 33), new_size=(32, 66))
def test_any_size_equals_pillow(size, new_size):
    assert resample.backend() == "numba"
    assert_as_pillow(size, new_size)
    assert_as_pillow(size, new_size, "bilinear")


@pytest.mark.parametrize(
    ("size", "new_size"),
    [
        ((640, 480), (512, 384)),
        ((950, 1256), (581, 768)),
        ((384, 384), (384, 384)),
        ((5000, 1), (3, 40)),  # 6,667 taps a pixel
        ((2, 5000), (900, 7)),
        ((1, 3), (2000, 1)),
        ((3, 1), (1, 1500)),
        ((1237, 811), (1236, 812)),
        ((1240, 1754), (271, 384)),
    ],
)
def test_chosen_sizes_equal_pillow(backend, size, new_size):
    image = Image.fromarray(noise(*size))
    for filter_ in ("bicubic", "bilinear"):
        assert_as_pillow(size, new_size, filter_)
        expected = np.asarray(image.resize(new_size, Image.Resampling[filter_.upper()]))
        np.testing.assert_array_equal(resample.resizer(image, filter_)(new_size), expected)


@needs_numba
@pytest.mark.parametrize("rounding", ["as it is", "off by one"])
def test_order_of_passes_is_probed(fresh_import, monkeypatch, rounding):
    """A Pillow whose pixels fit neither order resizes by itself, with a warning."""
    if rounding == "as it is":
        assert resample._order() in (resample._height_first, resample._width_first)
        return
    two_passes = resample._two_passes
    monkeypatch.setattr(resample, "_two_passes", lambda *args: two_passes(*args) + np.uint8(1))
    with pytest.warns(UserWarning, match="computes other pixels than Numba"):
        assert resample.backend() == "pillow"


@needs_numba
@given(size=sizes, step=st.integers(-2, 2), narrower=st.integers(0, 40))
def test_sizes_next_to_the_change_of_order(size, step, narrower):
    """Height loses about twice as many pixels as width, where Pillow 13 turns the passes round."""
    size = size[0] + narrower, size[1] + 2 * narrower + 2
    for filter_ in ("bicubic", "bilinear"):
        assert_as_pillow(size, (size[0] - narrower, size[1] - 2 * narrower - step), filter_)


def test_weights_of_known_cases():
    """By hand: the cubic at 1/4, 3/4, 5/4, 7/4 is 111, 29, -9, -3 over 128; a side cuts some off."""
    starts, weights = resample._weights(8, 4, "bicubic")
    np.testing.assert_array_equal(starts, [0, 0, 1, 3])
    third = np.array([-3, -9, 29, 111, 111, 29, -9, 0]) / 259 * 2**22
    np.testing.assert_array_equal(weights[2], np.rint(third))
    last = np.array([-3, -9, 29, 111, 111, 0, 0, 0]) / 239 * 2**22
    np.testing.assert_array_equal(weights[3], np.rint(last))
    assert weights.dtype == np.int32
    starts, weights = resample._weights(5, 5, "bicubic")
    assert (weights.max(axis=1) == 1 << 22).all() and (weights.sum(axis=1) == 1 << 22).all()
    starts, weights = resample._weights(8, 4, "bilinear")  # 1/8, 3/8, 3/8, 1/8 around the centre
    np.testing.assert_array_equal(starts, [0, 1, 3, 5])
    np.testing.assert_array_equal(weights[1], np.array([1, 3, 3, 1]) * 2**19)


def test_result_is_new_memory(backend):
    pixels = noise(20, 10)
    for size in ((20, 10), (10, 5)):
        resized = resample.resize(pixels, size)
        assert resized.flags.writeable and not np.may_share_memory(resized, pixels)


def test_views_and_strides_are_read_right(backend):
    pixels = noise(90, 70)[5:60:2, ::-1]
    expected = Image.fromarray(np.ascontiguousarray(pixels)).resize((31, 44))
    np.testing.assert_array_equal(resample.resize(pixels, (31, 44)), np.asarray(expected))


@pytest.mark.parametrize(
    ("pixels", "size", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), (2, 2), r"pixels float32 \(4, 4, 3\): must be uint8"),
        (np.zeros((4, 4), np.uint8), (2, 2), r"pixels uint8 \(4, 4\): must be uint8 \[H, W, 3\]"),
        (np.zeros((4, 4, 4), np.uint8), (2, 2), r"pixels uint8 \(4, 4, 4\)"),
        (np.zeros((4, 0, 3), np.uint8), (2, 2), "a side is below 1"),
        (np.zeros((4, 5, 3), np.uint8), (0, 7), r"\(4, 5\) to \(7, 0\) \[H, W\]: a side is below"),
    ],
)
def test_bad_arguments_are_named(backend, pixels, size, message):
    with pytest.raises(ValueError, match=message):
        resample.resize(pixels, size)


def test_views_are_the_same_with_both_backends(backend):
    image = Image.fromarray(noise(197, 140))
    tiling = Tiling(scheme=LlavaNext(), tile_size=56)
    views = patching.make_views(image, tiling)
    thumbnail = np.asarray(image.resize((56, 56), Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(views[0], thumbnail)
    assert len(views) > 1


def test_numba_is_not_imported_before_the_first_resize():
    code = "import sys, bluelm_jax.patching; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_pillow_serves_where_numba_is_missing(fresh_import, monkeypatch):
    monkeypatch.setitem(sys.modules, "numba", None)
    assert resample.backend() == "pillow"
    assert_as_pillow((30, 20), (7, 11))


def test_threads_decide_together(fresh_import, monkeypatch):
    """The first images of a run are resized in several threads at once; no half import is seen."""
    monkeypatch.setitem(sys.modules, "numba", None)
    start = threading.Barrier(8)

    def decide(_):
        start.wait()
        return resample.backend()

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert set(pool.map(decide, range(8))) == {"pillow"}


def test_broken_numba_is_reported(fresh_import, monkeypatch, tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 2.5 or less')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match=r"so Pillow resizes: Numba needs NumPy 2\.5"):
        assert resample.backend() == "pillow"


@needs_numba
def test_kernels_compile_where_nothing_can_be_cached(monkeypatch):
    import numba

    from bluelm_jax import resample_numba

    compile_ = numba.njit

    def njit(cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_(**options)

    monkeypatch.setattr(numba, "njit", njit)
    kernel = resample_numba._jit(resample_numba.resize_rows.py_func)
    rows, out = np.array([[8, 80], [16, 240]], np.uint8), np.empty((1, 2), np.uint8)
    kernel(rows, np.array([0]), np.array([[1 << 21, 1 << 21, 0, 0]], np.int32), out)
    np.testing.assert_array_equal(out, [[12, 160]])
