"""Dataset statistics: the known counts, every kind of source, and the command itself."""

import csv
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from bluelm_jax import schemes
from bluelm_jax.aspect_ratio import choose_grid
from bluelm_jax.data import images
from bluelm_jax.layout import Plain, image_layout
from bluelm_jax.patching import placement
from bluelm_jax.schemes import PRESETS
from experiments import tiling_figure, tiling_per_image, tiling_report, tiling_sources

ROOT = pathlib.Path(__file__).parent.parent
CASES = ROOT / "tests" / "testdata" / "tiling_cases.csv"
REAL_SIZES = pathlib.Path(schemes.__file__).parent / "data" / "assets" / "image_sizes.csv"
PAPER = ("relaxed_384_3x3_a0.1", "llava_next_384_3x3", "internvl_384_max9")


def summarise(sizes, names=PAPER):
    tilings = {name: PRESETS[name] for name in names}
    return tiling_report.summarise(sizes, tilings, Plain(), 14, 2)


def command(*arguments, module="experiments.tiling_stats"):
    environment = {**os.environ, "MPLCONFIGDIR": os.environ.get("TMPDIR", "/tmp")}
    return subprocess.run(
        [sys.executable, "-W", "error", "-m", module, *arguments],
        cwd=ROOT, env=environment, capture_output=True, text=True,
    )  # fmt: skip


def test_counts_on_the_bundled_sizes():
    groups = summarise(tiling_sources.from_csv(str(REAL_SIZES)))["groups"]
    counts = {
        group: [(p["smaller"], p["larger"]) for p in stats["pairs"] if p["scheme"] == PAPER[0]]
        for group, stats in groups.items()
    }
    assert counts["coco_val2017"] == [(130, 0), (4419, 55)]
    assert counts["sroie"] == [(24, 0), (330, 213)]
    assert counts["all"] == [(154, 0), (4749, 268)]
    assert [groups[name]["images"] for name in ("all", "coco_val2017", "sroie")] == [
        5621,
        5000,
        621,
    ]


def test_measures_equal_a_loop_over_images():
    sizes = tiling_sources.from_csv(str(CASES))
    report = summarise(sizes, ("relaxed_384_3x3_a0.1",))["groups"]["all"]["schemes"]
    tiling = PRESETS["relaxed_384_3x3_a0.1"]
    tokens, padding, enlargement = [], [], []
    for width, height in zip(sizes.widths.tolist(), sizes.heights.tolist(), strict=True):
        tokens.append(image_layout(width, height, tiling, Plain(), 14).num_tokens)
        grid = choose_grid(width, height, tiling)
        drawn = placement(width, height, grid, tiling)
        canvas = grid.cols * grid.rows * 384**2
        padding.append(1 - drawn.width * drawn.height / canvas)
        enlargement.append(canvas / (width * height))
    for name, values in {"tokens": tokens, "padding": padding, "enlargement": enlargement}.items():
        found = report["relaxed_384_3x3_a0.1"][name]
        expected = [np.mean(values), *np.percentile(values, (50, 95)), np.max(values)]
        np.testing.assert_allclose(list(found.values()), expected)


def test_per_image_reproduces_the_reference_file(tmp_path):
    out = tmp_path / "out.csv"
    tiling_per_image.write(str(out), tiling_sources.from_csv(str(CASES)))
    assert out.read_bytes() == CASES.read_bytes()


def test_per_image_writes_zero_where_the_rule_chooses_nothing(tmp_path):
    (tmp_path / "in.csv").write_text("height,width\n5000,1\n")
    tiling_per_image.write(str(tmp_path / "out.csv"), tiling_sources.from_csv(tmp_path / "in.csv"))
    with open(tmp_path / "out.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["width"], row["height"]) == ("1", "5000")
    assert row["relaxed_384_3x3_a0.1.cols"] == row["relaxed_384_3x3_a0.1.rows"] == "0"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "must name columns width and height"),
        ("", "must name columns width and height"),
        ("width,height\n3,4\n5,x\n", r"data row 2: \['5', 'x'\]"),
        ("width,height\n3,0\n", r"data row 1: \['3', '0'\]"),
        ("width,height\n3\n", r"data row 1: \['3'\]"),
        ("width,height\n3,99999999999999999999\n", "data row 1"),
    ],
)
def test_bad_csv_names_the_row(tmp_path, text, message):
    path = tmp_path / "sizes.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        tiling_sources.from_csv(str(path))


@pytest.fixture
def folder(tmp_path):
    """Six files: three images (one turned by EXIF), and three that cannot be used."""
    root = tmp_path / "images"
    (root / "sub").mkdir(parents=True)
    Image.new("RGB", (64, 48)).save(root / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (80, 40)).save(root / "sub" / "turned.JPG", format="jpeg", exif=exif)
    Image.new("L", (30, 30)).save(root / "sub" / "grey.png")
    (root / "sub" / "broken.jpg").write_bytes(b"no image")
    (root / "empty.png").touch()
    Image.new("L", (1, 50)).save(root / "thin.png")
    (root / "notes.txt").write_text("not listed")
    return root


@pytest.mark.parametrize("workers", [1, 2])
def test_folder(folder, workers, monkeypatch):
    monkeypatch.setattr(tiling_sources, "_CHUNK", 2)
    sizes = tiling_sources.from_folder(str(folder), workers)
    pairs = list(zip(sizes.widths.tolist(), sizes.heights.tolist(), strict=True))
    assert pairs == [(64, 48), (30, 30), (40, 80)]
    assert sizes.group_names == ("(top folder)", "sub")
    assert [name for name, _ in sizes.unreadable] == ["empty.png", "sub/broken.jpg", "thin.png"]
    assert all(reason for _, reason in sizes.unreadable)


def test_no_pixel_is_decoded(folder, monkeypatch):
    def refuse(*_):
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", refuse)
    with pytest.raises(AssertionError, match="decoded"), Image.open(folder / "a.png") as image:
        image.load()
    assert len(tiling_sources.from_folder(str(folder), 1)) == 3


def test_llava_dataset(folder, tmp_path):
    """Images count once a sample, samples share tiles, paths out of the root are listed."""
    records = [
        {"id": "1", "image": "a.png"},
        {"id": "2", "image": "a.png"},
        {"id": "3", "image": ["sub/grey.png", "a.png"]},
        {"id": "4"},
        {"id": "5", "image": "../secret.png"},
        {"id": "6", "image": "gone.jpg"},
    ]
    path = tmp_path / "data.json"
    path.write_text(json.dumps([{**record, "conversations": []} for record in records]))
    sizes = tiling_sources.from_llava(str(path), str(folder), 1)
    assert sizes.widths.tolist() == [64, 64, 30, 64]
    assert sizes.num_images.tolist() == [1, 1, 2, 2]
    assert [name for name, _ in sizes.unreadable] == ["../secret.png", "gone.jpg"]
    report = summarise(sizes)
    assert report["images"] == 4 and report["unreadable"][0]["file"] == "../secret.png"
    views = report["groups"]["all"]["schemes"]["internvl_384_max9"]["views"]
    one, shared = (
        choose_grid(64, 48, schemes.Tiling(scheme=schemes.InternVL15(max_tiles=n))) for n in (9, 4)
    )
    assert views["max"] == 1 + max(one.cols * one.rows, shared.cols * shared.rows)


def test_the_library_reads_headers_with_the_training_limits(folder):
    assert dict(tiling_sources.from_folder(str(folder), 1).unreadable)["thin.png"] == (
        "shorter side 1, below min_side = 2"
    )
    assert images.DEFAULT_LIMITS.min_side == 2


def test_command_prints_the_counts_and_writes_files(tmp_path):
    done = command(f"--sizes={REAL_SIZES}", f"--out={tmp_path}")
    assert done.returncode == 0, done.stderr
    for line in (
        "against llava_next_384_3x3: smaller 130, equal 4,870, larger 0",
        "against internvl_384_max9: smaller 4,419, equal 526, larger 55",
        "against internvl_384_max9: smaller 330, equal 78, larger 213",
    ):
        assert line in done.stdout
    assert (tmp_path / "table.txt").read_text() in done.stdout
    report = json.loads((tmp_path / "stats.json").read_text())
    assert report["groups"]["sroie"]["images"] == 621
    for name in ("grids.png", "costs.png"):
        with Image.open(tmp_path / name) as plot:
            assert len(plot.convert("RGB").getcolors(10**6)) > 5


def test_command_per_image(tmp_path):
    done = command(f"--sizes={CASES}", f"--per_image={tmp_path / 'o.csv'}")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o.csv").read_bytes() == CASES.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of --sizes, --folder and --data_json"),
        (("--sizes=a", "--folder=b"), "give one of"),
        (("--data_json=a",), "needs --image_root"),
        (("--folder=a", "--schemes=best"), "--schemes: ['best'] not among"),
        (("--sizes=a", "photo.jpg"), "are for --visualize"),
        (("--visualize=a",), "name image files, or sizes such as 394x390"),
    ],
)
def test_command_refuses(arguments, message):
    done = command(*arguments)
    assert done.returncode != 0 and message in done.stdout + done.stderr


def test_figure_shows_what_each_scheme_does(tmp_path, capsys):
    tilings = {name: PRESETS[name] for name in (*PAPER, "minicpm_v_448_max9", "fixed_384")}
    Image.new("RGB", (60, 200), (0, 200, 0)).save(tmp_path / "394x390.png")
    names = ["394x390", str(tmp_path / "394x390.png"), str(tmp_path / "none.png"), "90000x90000"]
    written = tiling_figure.write(str(tmp_path / "out"), names, tilings, Plain())
    assert [path.name for path in written] == ["394x390.png", "394x390_1.png"]
    printed = capsys.readouterr().out
    assert "none.png" in printed and "90000x90000" in printed
    with Image.open(written[1]) as figure:
        shown = {colour for _, colour in figure.convert("RGB").getcolors(10**6)}
    marks = {tiling_figure._PADDING, tiling_figure._GRID_LINE, tiling_figure._THUMBNAIL_LINE}
    assert {(0, 200, 0)} | marks <= shown


def test_figure_keeps_one_scale(tmp_path):
    """The 768-pixel canvas of LLaVA-NeXT is drawn twice as wide as relaxed matching's 384."""
    image = tiling_figure.synthetic_picture(394, 390)
    widths = [
        tiling_figure.draw(image, {"a": PRESETS["llava_next_384_3x3"], "b": PRESETS[name]}).width
        for name in ("llava_next_384_3x3", "relaxed_384_3x3_a0.1")
    ]
    assert widths[0] - widths[1] == pytest.approx(460 / 2, abs=4)


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (3000, 1), (394, 390)])
def test_any_size_has_a_picture(size):
    figure = tiling_figure.draw(tiling_figure.synthetic_picture(*size), dict(PRESETS))
    assert figure.width > 100


@pytest.mark.parametrize(
    ("module", "arguments", "message"),
    [
        ("choose_grids", ["--random_sizes=50"], "every choice equal"),
        (
            "preprocess",
            ["--rounds=1", "--batch=1", "--sizes=640x480"],
            "5 views, pixels equal to Pillow's",
        ),
    ],
)
def test_benchmarks_run_and_check_what_they_time(module, arguments, message):
    done = command(*arguments, module=f"experiments.benchmarks.{module}")
    assert done.returncode == 0, done.stderr
    assert message in done.stdout
