"""Grid choices: reference decisions of the originals, the paper's examples, and properties."""

import csv
import pathlib
import subprocess
import sys
from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from bluelm_jax import aspect_ratio, aspect_ratio_vectorized, layout, schemes
from bluelm_jax.schemes import (
    PRESETS,
    Fixed,
    Grid,
    InternVL15,
    LlavaNext,
    MiniCPMV,
    Relaxed,
    Tiling,
)

CASES = pathlib.Path(__file__).parent / "testdata" / "tiling_cases.csv"
REAL_SIZES = pathlib.Path(schemes.__file__).parent / "data" / "assets" / "image_sizes.csv"
SETTINGS = hypothesis.settings(max_examples=100)
SIDE = st.integers(1, 20000)


def read_cases():
    with CASES.open(newline="") as file:
        return list(csv.DictReader(file))


def real_sizes():
    return np.loadtxt(REAL_SIZES, delimiter=",", skiprows=1, usecols=(0, 1), dtype=np.int64)


def decide(width, height, tiling, preset):
    """What the scalar functions say of one size, by column name of the reference file."""
    if isinstance(tiling.scheme, Relaxed):
        grid = aspect_ratio.relaxed_by_the_letter(width, height, tiling.scheme, tiling.tile_size)
        cols, rows = grid or (0, 0)
        return {"cols": cols, "rows": rows}
    grid = aspect_ratio.choose_grid(width, height, tiling)
    found = {"cols": grid.cols, "rows": grid.rows, "views": layout.num_views(width, height, tiling)}
    if preset == "llava_next_336_p5":
        rule = schemes.UnpadNewline(allow_empty=True)
        found["tokens"] = layout.image_layout(width, height, tiling, rule, 24).num_tokens
    if preset == "onevision_384_6x6_max9":
        rule = schemes.UnpadNewline(anyres_max=9, allow_empty=True)
        found["tokens"] = layout.image_layout(width, height, tiling, rule, 27).num_tokens
    if isinstance(tiling.scheme, MiniCPMV):
        native = aspect_ratio.native_sizes(width, height, tiling)
        cols, rows = native.grid or (0, 0)
        slice_w, slice_h = native.slice_size or (0, 0)
        found |= {"cols": cols, "rows": rows, "slice_w": slice_w, "slice_h": slice_h}
        found["overview_w"], found["overview_h"] = native.overview_size
    return found


@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "fixed_384"])
def test_reference_decisions(preset):
    compared = 0
    for case in read_cases():
        width, height = int(case["width"]), int(case["height"])
        columns = {k.removeprefix(preset + "."): v for k, v in case.items() if preset + "." in k}
        if set(columns.values()) == {""}:  # the reference stops at a side ratio of 400
            with pytest.raises(ValueError, match="within a ratio of 400"):
                aspect_ratio.native_sizes(width, height, PRESETS[preset])
            continue
        found = decide(width, height, PRESETS[preset], preset)
        assert {k: str(v) for k, v in found.items()} == columns, (width, height)
        compared += 1
    assert compared > 870


def test_every_reference_column_belongs_to_a_preset():
    columns = set(read_cases()[0]) - {"width", "height"}
    assert {column.rpartition(".")[0] for column in columns} == set(PRESETS) - {"fixed_384"}


@pytest.mark.parametrize(
    ("size", "scheme", "grid"),
    [
        ((394, 390), LlavaNext(), (2, 2)),
        ((394, 390), Relaxed(), (1, 1)),
        ((380, 76), InternVL15(max_tiles=6), (5, 1)),
        ((380, 76), Relaxed(), (1, 1)),
        ((380, 393), LlavaNext(), (1, 2)),
        ((380, 393), Relaxed(), (1, 1)),
        ((500, 102), InternVL15(max_tiles=6), (5, 1)),
        ((500, 102), Relaxed(), (2, 1)),
        ((768, 1536), Relaxed(grids=schemes.GRIDS_4X4), (2, 4)),
        ((768, 1536), Fixed(), (1, 1)),
    ],
)
def test_examples_of_the_paper(size, scheme, grid):
    assert aspect_ratio.choose_grid(*size, Tiling(scheme=scheme)) == grid


@pytest.mark.parametrize("size", [(1133, 567), (577, 1153), (612, 1223)])
def test_llava_next_truncates_as_float64(size):
    """These change under exact arithmetic, so the order of float operations must stay."""

    def exact(width, height, grids, side):
        def key(grid):
            canvas_w, canvas_h = grid[0] * side, grid[1] * side
            scale = min(Fraction(canvas_w, width), Fraction(canvas_h, height))
            effective = min(int(width * scale) * int(height * scale), width * height)
            return effective, effective - canvas_w * canvas_h

        return max(grids, key=key)

    p5 = PRESETS["llava_next_336_p5"]
    presets = (p5, PRESETS["llava_next_384_3x3"], PRESETS["onevision_384_6x6_max9"])
    differs = [
        aspect_ratio.choose_grid(*size, tiling)
        != exact(*size, tiling.scheme.grids, tiling.tile_size)
        for tiling in presets
    ]
    assert any(differs)


def test_llava_next_keeps_the_earlier_of_full_ties():
    tall, wide = Grid(1, 2), Grid(2, 1)
    for first, second in ((tall, wide), (wide, tall)):
        tiling = Tiling(scheme=LlavaNext(grids=(first, second)), tile_size=336)
        assert aspect_ratio.choose_grid(300, 200, tiling) == first


def test_pinpoints_become_grids_in_order():
    pinpoints = [(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)]
    assert schemes.grids_from_pinpoints(pinpoints, 336) == schemes.GRIDS_LLAVA_P5
    with pytest.raises(ValueError, match=r"pinpoint \(336, 400\).*336"):
        schemes.grids_from_pinpoints([(336, 400)], 336)


@pytest.mark.parametrize(
    ("size", "num_images", "grid"),
    [
        ((448, 448), 1, (1, 1)),
        ((633, 634), 1, (1, 1)),
        ((634, 634), 1, (2, 2)),
        ((2000, 2000), 1, (3, 3)),
        ((2000, 2000), 2, (2, 2)),  # at most 6 tiles each
        ((2000, 2000), 4, (1, 1)),  # at most 3
        ((2000, 1000), 13, (1, 1)),  # never below one tile
    ],
)
def test_internvl(size, num_images, grid):
    tiling = PRESETS["internvl_448_max12"]
    assert aspect_ratio.choose_grid(*size, tiling, num_images) == grid
    sizes = np.array([size])
    vectorised = aspect_ratio_vectorized.choose_grids(*sizes.T, tiling, num_images)
    assert vectorised.tolist() == [list(grid)]


def test_internvl_min_tiles():
    tiling = Tiling(scheme=InternVL15(min_tiles=4, max_tiles=6))
    assert aspect_ratio.choose_grid(100, 100, tiling) == (2, 2)


def test_minicpm_square_hangs_on_one_ulp():
    assert aspect_ratio.choose_grid(1050, 1050, PRESETS["minicpm_v_448_max9"]) == (3, 2)


def test_native_sizes_are_for_minicpm_only():
    with pytest.raises(ValueError, match="Fixed has no native view sizes"):
        aspect_ratio.native_sizes(10, 10, Tiling(scheme=Fixed()))


@pytest.mark.parametrize(
    ("size", "grid"), [((1, 5000), (1, 3)), ((5000, 1), (3, 1)), ((2, 19999), (1, 3))]
)
def test_relaxed_falls_back_where_the_rule_chooses_nothing(size, grid):
    tiling = PRESETS["relaxed_384_3x3_a0.1"]
    assert aspect_ratio.relaxed_by_the_letter(*size, tiling.scheme, 384) is None
    assert aspect_ratio.choose_grid(*size, tiling) == grid
    sizes = np.array([size])
    vectorised = aspect_ratio_vectorized.choose_grids(*sizes.T, tiling)
    assert vectorised.tolist() == [list(grid)]
    letter = aspect_ratio_vectorized.relaxed_by_the_letter(*sizes.T, tiling.scheme, 384)
    assert letter.tolist() == [[0, 0]]


def share_of_best(width, height, tiling):
    side = tiling.tile_size

    def effective(grid):
        return aspect_ratio.effective_and_wasted(width, height, grid[0] * side, grid[1] * side)[0]

    chosen = effective(aspect_ratio.choose_grid(width, height, tiling))
    return chosen / max(max(map(effective, tiling.scheme.grids)), 1)


def test_relaxations_compound_unless_bounded():
    assert share_of_best(422, 807, Tiling(scheme=Relaxed())) == pytest.approx(0.828, abs=5e-4)
    assert share_of_best(422, 807, Tiling(scheme=Relaxed(max_total_loss=0.1))) >= 0.9


@SETTINGS
@hypothesis.given(SIDE, SIDE, st.sampled_from([0.0, 0.05, 0.1, 0.3]))
def test_total_loss_bound_holds(width, height, bound):
    tiling = Tiling(scheme=Relaxed(alpha=0.3, max_total_loss=bound, grids=schemes.GRIDS_4X4))
    hypothesis.assume(share_of_best(width, height, Tiling(scheme=Relaxed())) > 0)
    assert share_of_best(width, height, tiling) >= 1 - bound


@SETTINGS
@hypothesis.given(SIDE, SIDE, st.randoms(use_true_random=False))
def test_relaxed_ignores_the_order_of_its_candidates(width, height, random):
    grids = list(schemes.GRIDS_4X4)
    random.shuffle(grids)
    given, shuffled = (
        Tiling(scheme=Relaxed(grids=tuple(order))) for order in (schemes.GRIDS_4X4, grids)
    )
    chosen = aspect_ratio.choose_grid(width, height, given)
    assert chosen == aspect_ratio.choose_grid(width, height, shuffled)


EXTRA = {
    "bounded": Tiling(scheme=Relaxed(max_total_loss=0.1)),
    "min_tiles": Tiling(scheme=InternVL15(min_tiles=3, max_tiles=8)),
    "one_tile": Tiling(scheme=InternVL15(max_tiles=1)),
    "two_slices": Tiling(scheme=MiniCPMV(max_slices=2)),
    "small_tiles": Tiling(scheme=MiniCPMV(max_slices=30), tile_size=56),
}


@pytest.mark.parametrize("name", [*PRESETS, *EXTRA])
def test_vectorised_equals_scalar(name):
    tiling = PRESETS.get(name) or EXTRA[name]
    rng = np.random.default_rng(0)
    shapes = np.exp(rng.uniform(0, np.log(20000), (1000, 2))).astype(np.int64)
    squares = np.repeat(np.arange(1, 2000, 23), 2).reshape(-1, 2)
    ties = np.array([(640, 512), (875, 500), (1280, 1024), (1050, 1050), (1, 20000)])
    sizes = np.concatenate(
        [real_sizes()[::11], rng.integers(1, 4000, (1000, 2)), shapes, squares, ties]
    )
    vectorised = aspect_ratio_vectorized.choose_grids(sizes[:, 0], sizes[:, 1], tiling)
    scalar = [aspect_ratio.choose_grid(w, h, tiling) for w, h in sizes.tolist()]
    np.testing.assert_array_equal(vectorised, scalar)


@pytest.mark.parametrize(
    ("widths", "heights", "message"),
    [
        ([10, 0], [10, 10], "image size 0x10 at 1"),
        ([10.0], [10.0], "must be integers"),
        ([10], [10, 10], r"must be equal \[N\]"),
    ],
)
def test_vectorised_refuses(widths, heights, message):
    with pytest.raises(ValueError, match=message):
        aspect_ratio_vectorized.choose_grids(
            np.array(widths), np.array(heights), Tiling(scheme=Fixed())
        )


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("size", [(0, 5), (5, 0), (-3, 5)])
def test_empty_images_are_refused(name, size):
    with pytest.raises(ValueError, match=f"image size {size[0]}x{size[1]}"):
        aspect_ratio.choose_grid(*size, PRESETS[name])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Relaxed(alpha=-0.1), r"Relaxed.alpha = -0.1: must be finite and >= 0"),
        (lambda: Relaxed(max_total_loss=1.0), r"Relaxed.max_total_loss = 1.0"),
        (lambda: Relaxed(grids=()), r"Relaxed.grids = \(\): must be a non-empty"),
        (lambda: LlavaNext(grids=((0, 1),)), r"LlavaNext.grids .*pairs >= 1"),
        (lambda: LlavaNext(grids=((1, 1), (1, 1))), r"without duplicates"),
        (lambda: InternVL15(min_tiles=3, max_tiles=2), r"InternVL15.max_tiles = 2: must be >= 3"),
        (lambda: MiniCPMV(max_slices=0), r"MiniCPMV.max_slices = 0"),
        (lambda: Tiling(scheme=Fixed(), tile_size=0), r"Tiling.tile_size = 0"),
        (lambda: Tiling(scheme=Fixed(), pad_color=(0, 0, 256)), r"Tiling.pad_color"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_values_from_a_config_file_are_checked_without_annotations():
    """A gin file brings lists and any string; in a child the library runs as a user runs it."""
    program = """
from bluelm_jax.schemes import Fixed, LlavaNext, Relaxed, Tiling
assert LlavaNext(grids=[[1, 2], [2, 1]]) == LlavaNext(grids=((1, 2), (2, 1)))
assert hash(Tiling(scheme=Relaxed(alpha=0, grids=[[1, 1]]), pad_color=[0, 0, 0]))
for make, message in (
    (lambda: Fixed(fit="crop"), "Fixed.fit = 'crop': must be 'pad' or 'stretch'"),
    (lambda: Tiling(scheme=Fixed(), fit="crop"), "Tiling.fit = 'crop'"),
    (lambda: Tiling(scheme=Fixed(), thumbnail="middle"), "Tiling.thumbnail = 'middle'"),
    (lambda: Tiling(scheme="relaxed"), "Tiling.scheme = 'relaxed'"),
):
    try:
        make()
    except ValueError as error:
        assert message in str(error), error
    else:
        raise SystemExit(f"accepted: {message}")
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_controlled_form_differs_only_in_the_grid():
    for scheme in (LlavaNext(), InternVL15(), MiniCPMV(), Relaxed(), Fixed()):
        tiling = schemes.controlled(scheme, tile_size=56)
        assert (tiling.resolved_fit, tiling.resolved_thumbnail) == ("pad", "last")
        assert [tiling.has_thumbnail(grid) for grid in ((1, 1), (2, 1))] == [False, True]
        both = Tiling(scheme=scheme, thumbnail="last", single_tile_thumbnail=True)
        assert both.has_thumbnail((1, 1))
