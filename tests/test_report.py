"""Tests of the results and their report."""

import copy
import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from experiments import report, report_plots, report_tables, results, statistics, summarise

REFERENCES = ["123456", "654321", "111222", "987650"]
BUCKETS = ["tall-large", "square-small", "square-small", "square-small"]
IMAGES = [f"pages/{i}.png" for i in range(4)]
RUN = results.RunInfo(
    seeds=[0, 7],
    version="0.1.0",
    commit="abc1234",
    device="2 CPU cores",
    phases=[{"name": "render", "seconds": 12.0}, {"name": "train", "seconds": 100.0}],
    peak_rss_mb=1234.0,
    tile_size=56,
    data={"held-out pages": 4},
    steps={"stage 2": 300},
    config={"width": 96},
    commands=["python -m experiments.quickstart --out=runs/here"],
)
EXPORT = results.ExportResult(
    num_images=3,
    rows=[
        {"name": "JAX float", "exact_match": 0.5, "character_accuracy": 0.9, "agreement": None},
        {"name": "TFLite", "exact_match": 0.25, "character_accuracy": 0.8, "agreement": 0.875},
    ],
    files=[{"name": "vision.tflite", "bytes": 1_234_567}],
    stages=[
        {"stage": "decode step", "variant": "float", "ms": 1.5},
        {"stage": "decode step", "variant": "quantised", "ms": 1.25},
        {"stage": "projector", "variant": "float", "ms": 0.5},
    ],
)


def _readings(name, predictions, grids, **overrides):
    values = {
        "name": name,
        "label": name.title(),
        "fit": "pad",
        "seeds": [0, 7],
        "predictions": predictions,
        "train_seconds": [100.0, 110.0],
        "loss_curves": [[(0, 2.0), (10, 1.0)], [(0, 2.1), (10, float("nan"))]],
        "grids": grids,
        "views": [cols * rows + 1 for cols, rows in grids],
        "tokens": [16 * (cols * rows + 1) for cols, rows in grids],
    }
    return summarise.SchemeReadings(**(values | overrides))


def _schemes():
    wrong = ["123456", "654321", "111229", ""]
    return [
        _readings("other", [wrong, wrong], [(1, 2), (2, 2), (2, 2), (3, 3)]),
        _readings("relaxed", [REFERENCES, wrong], [(1, 2), (1, 1), (2, 2), (3, 2)]),
    ]


def _build(**options):
    return summarise.build_results(
        copy.deepcopy(RUN),
        _schemes(),
        references=REFERENCES,
        buckets=BUCKETS,
        images=IMAGES,
        bootstrap=summarise.Bootstrap(num_resamples=200),
        **options,
    )


@pytest.fixture(name="pages")
def _pages(tmp_path):
    (tmp_path / "pages").mkdir()
    for name in IMAGES:
        Image.new("L", (60, 90), 240).save(tmp_path / name)
    return tmp_path


def test_numbers_of_a_scheme():
    other, relaxed = _build()["schemes"]
    assert other["exact_match"]["value"] == 0.5
    # Both seeds read image 0 and 1; the first also reads 2 and 3.
    assert relaxed["exact_match"]["value"] == 0.75
    assert other["character_accuracy"]["value"] == pytest.approx((1 + 1 + 5 / 6 + 0) / 4)
    per_image = np.array([1.0, 1.0, 0.5, 0.5])
    assert relaxed["exact_match"] == statistics.bootstrap_mean(per_image, num_resamples=200)
    assert [seed["exact_match"] for seed in relaxed["per_seed"]] == [1.0, 0.5]
    assert other["mean_tokens"] == 16 * (3 + 5 + 5 + 10) / 4
    assert other["mean_views"] == (3 + 5 + 5 + 10) / 4
    assert other["train_seconds"] == 105.0
    assert other["grids"] == {"1x2": 1, "2x2": 2, "3x3": 1}
    assert [(b["bucket"], b["count"]) for b in other["buckets"]] == [
        ("square-small", 3),
        ("tall-large", 1),
    ]
    assert other["buckets"][0]["exact_match"]["value"] == pytest.approx(1 / 3)
    assert other["chance_character_accuracy"] < 0.5 < other["character_accuracy"]["value"]


def test_numbers_of_a_comparison():
    (comparison,) = _build()["comparisons"]
    assert (comparison["name"], comparison["other"]) == ("relaxed", "other")
    # Tiles 2, 1, 4, 6 against 2, 4, 4, 9.
    assert [comparison[key] for key in ("smaller", "equal", "larger")] == [2, 2, 0]
    assert comparison["difference"]["value"] == 0.25
    assert comparison["seed_differences"] == [0.5, 0.0]


def test_a_loss_that_is_not_finite_is_kept_as_a_gap(tmp_path):
    built = _build()
    assert built["schemes"][0]["per_seed"][1]["loss_curve"] == [[0, 2.1], [10, None]]
    results.save(built, tmp_path / "results.json")
    assert results.load(tmp_path / "results.json") == built


def test_examples_show_differing_grids_first():
    examples = _build(num_examples=2)["examples"]
    # Grids differ on images 1 and 3, whose bucket comes before; 2 is the first alike of its bucket.
    assert [example["image"] for example in examples] == ["pages/1.png", "pages/2.png"]
    assert [r["correct"] for r in examples[1]["readings"]] == [False, True]
    everything = _build(num_examples=9)["examples"]
    assert sorted(example["image"] for example in everything) == IMAGES


def test_examples_do_not_depend_on_who_was_right():
    schemes = _schemes()
    nothing = _readings("relaxed", [[""] * 4] * 2, schemes[1].grids)
    chosen = [
        [example["image"] for example in summarise.pick_examples(s, REFERENCES, BUCKETS, IMAGES, 2)]
        for s in (schemes, [schemes[0], nothing])
    ]
    assert chosen[0] == chosen[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"grids": [(1, 1)]}, "a list of 1 values for 4 images"),
        ({"train_seconds": [1.0]}, "1 train_seconds for 2 seeds"),
        ({"predictions": [["1"], ["1"]]}, "a list of 1 values for 4 images"),
    ],
)
def test_lists_of_other_lengths(overrides, message):
    scheme = dataclasses.replace(_schemes()[0], **overrides)
    with pytest.raises(ValueError, match=message):
        summarise.scheme_result(scheme, REFERENCES, BUCKETS, summarise.Bootstrap())


def test_equal_names_are_refused():
    schemes = [_schemes()[0]] * 2
    with pytest.raises(ValueError, match="must differ"):
        summarise.build_results(RUN, schemes, references=REFERENCES, buckets=BUCKETS, images=IMAGES)


@pytest.mark.parametrize("part", ["run", "schemes"])
def test_missing_part_is_named(part, tmp_path):
    built = _build()
    del built[part]
    (tmp_path / "results.json").write_text(json.dumps(built))
    with pytest.raises(ValueError, match=rf"results\.json: no {part}"):
        results.load(tmp_path / "results.json")


def test_missing_part_of_a_scheme_is_named():
    built = _build()
    del built["schemes"][1]["mean_views"]
    with pytest.raises(ValueError, match=r"no schemes\[1\]\.mean_views"):
        results.check(built)


def test_terminal_table_has_the_numbers():
    text = report.table_text(_build(export=EXPORT))
    lines = text.splitlines()
    assert max(map(len, lines)) <= report_tables.TERMINAL_WIDTH
    (other,) = [line for line in lines if line.startswith(" Other ")]
    assert re.search(r"50\.0 \[[\d.]+, [\d.]+\] .* 92 / 148 .* 5\.75 .* 1 min 45 s", other)
    assert any(re.search(r"Relaxed against Other +2 +2 +0 +\+25\.0 \[", line) for line in lines)
    assert any(re.search(r"TFLite +25\.0 +80\.0 +87\.5", line) for line in lines)
    assert any(re.search(r"vision\.tflite +1\.2 MB", line) for line in lines)
    assert any(re.search(r"decode step +1\.50 +1\.25", line) for line in lines)
    assert any(re.search(r"projector +0\.50 +–", line) for line in lines)
    assert "2 training seeds (0, 7)" in " ".join(text.split())


def test_terminal_table_says_that_the_export_did_not_run():
    text = report.table_text(_build(export_note="TensorFlow is not installed."))
    assert "The export was not run: TensorFlow is not installed." in text
    assert "TFLite" not in text


def test_report_is_complete(pages):
    paths = report.write_report(_build(export=EXPORT), pages / "out", image_root=pages)
    html, markdown = paths["html"].read_text(), paths["md"].read_text()
    assert not re.search(r'(src|href)="(?!data:)', html)
    # Four plots, and two schemes for each of four examples.
    assert html.count('src="data:image/png;base64,') == 4 + 2 * 4
    for text in (html, markdown):
        for needed in (
            "What this does not show",
            "does not settle the paper’s claim",
            "95 % percentile bootstrap interval over 4 held-out images",
            "2 training seeds (0, 7)",
            "python -m experiments.quickstart --out=runs/here",
            "vision.tflite",
            "1234 MB",
            "abc1234",
        ):
            assert needed in text
    for name in re.findall(r"\]\((plots/[^)]+)\)", markdown):
        with Image.open(pages / "out" / name) as image:
            assert min(image.size) > 300
    assert len(re.findall(r"\]\(plots/", markdown)) == 5
    assert results.load(paths["json"]) == _build(export=EXPORT)


def test_markdown_tables_are_rectangular(pages):
    built = _build(export=EXPORT)
    built["examples"][0]["readings"][0]["reading"] = "1|2<b>\n$3_"
    paths = report.write_report(built, pages, image_root=pages)
    tables = re.findall(r"(?:^\|.*\n)+", paths["md"].read_text(), flags=re.MULTILINE)
    assert len(tables) >= 8
    for table in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}
        assert len(widths) == 1, table
    html = paths["html"].read_text()
    assert "2<b>\n" not in html and "&lt;" in html


def test_report_of_little(tmp_path):
    built = _build(export_note="--export=false")
    for part in ("comparisons", "examples"):
        del built[part]
    built["run"] |= {"seeds": [0], "phases": [], "data": {}, "steps": {}, "commands": []}
    for scheme in built["schemes"]:
        scheme["per_seed"] = [scheme["per_seed"][0] | {"loss_curve": []}]
    paths = report.write_report(built, tmp_path)
    for text in (paths["html"].read_text(), paths["md"].read_text()):
        assert "The export was not run: --export=false." in text
        assert "No examples were recorded." in text
        assert "No scheme was compared" in text
        assert "The commands were not recorded." in text
        assert "one training seed (0)" in text
    assert "examples" not in paths


def test_report_names_what_was_compared(pages):
    built = _build()
    before = report.write_report(built, pages)["md"].read_text()
    assert before.startswith("# Reading with 2 tiling schemes\n") and "| Scheme |" in before
    assert "the paper’s claim about tiling" in before
    built["run"]["compared"] = "token downsampler"
    paths = report.write_report(built, pages)
    for text in (paths["html"].read_text(), paths["md"].read_text()):
        assert "Reading with 2 token downsamplers" in text and "tiling" not in text
        assert "settle which downsampler serves" in text and "seeds a downsampler" in text
    assert "| Downsampler |" in paths["md"].read_text()


def test_example_whose_image_is_gone(tmp_path):
    paths = report.write_report(_build(), tmp_path)
    assert "The image 1.png is not there any more." in paths["html"].read_text()
    assert "examples" not in paths


def test_same_results_same_report(pages):
    first = report.write_report(_build(), pages / "a", image_root=pages)
    again = report.write_report(_build(), pages / "b", image_root=pages)
    for name, path in first.items():
        assert path.read_bytes() == again[name].read_bytes(), name


def test_command_makes_the_report_from_the_file(pages):
    results.save(_build(export=EXPORT), pages / "results.json")
    done = subprocess.run(
        [sys.executable, "-m", "experiments.report", f"--results={pages / 'results.json'}"],
        cwd=pathlib.Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert report.table_text(_build(export=EXPORT)) in done.stdout
    assert (pages / "report.html").is_file()


def test_findings_follow_the_interval():
    built = _build()
    built["comparisons"][0]["difference"] = {"value": 0.25, "low": 0.125, "high": 0.375}
    assert "+25.0 [+12.5, +37.5] points" in report.findings(built)[2]
    assert "(by training seed +50.0, +0.0); the interval excludes 0" in report.findings(built)[2]
    built["comparisons"][0]["difference"]["low"] = -0.125
    assert "[−12.5, +37.5]" in report.findings(built)[2]
    assert "no difference is shown" in report.findings(built)[2]


@pytest.mark.parametrize(
    ("reading", "truth", "expected"),
    [
        ("123", "123", "123"),
        ("193", "123", "1<b>9</b>3"),
        ("1234", "123", "123<b>4</b>"),
        ("13", "123", '1<b class="gap" title="missing">·</b>3'),
        ("<3", "12", "<b>&lt;</b><b>3</b>"),
    ],
)
def test_marked_errors(reading, truth, expected):
    assert report.mark_errors(reading, truth) == expected


@pytest.mark.parametrize(
    ("fit", "grid", "size", "page"),
    [
        ("pad", (2, 2), (320, 320), (107, 0, 213, 320)),
        ("pad", (3, 1), (318, 106), (141, 0, 176, 106)),
        ("stretch", (2, 1), (320, 160), (0, 0, 320, 160)),
    ],
)
def test_drawn_grid(fit, grid, size, page):
    drawn = report_plots.draw_grid(Image.new("L", (30, 90), 255), grid, fit)
    assert drawn.size == size
    pixels = np.asarray(drawn).astype(int)
    white = (pixels > 250).all(axis=-1)
    ys, xs = np.nonzero(white)
    found = (xs.min(), ys.min(), xs.max() + 1, ys.max() + 1)
    assert np.abs(np.array(found) - page).max() <= 3  # lines two pixels wide cover the border
    cell = size[0] // grid[0]
    lines = (pixels == [0xD5, 0x5E, 0x00]).all(axis=-1)
    # The row through the middle of the first row of tiles crosses one line a border.
    crossings = np.flatnonzero(lines[cell // 2])
    borders = [min(size[0] - 1, cell * i) for i in range(grid[0] + 1)]
    assert all(np.abs(crossings - border).min() <= 1 for border in borders)
    assert all(min(abs(c - border) for border in borders) <= 1 for c in crossings)


def test_drawn_grid_refuses_an_unknown_fit():
    with pytest.raises(ValueError, match="crop"):
        report_plots.draw_grid(Image.new("L", (8, 8)), (1, 1), "crop")


def test_running_mean_passes_over_gaps():
    values = np.arange(100.0)
    mean = report_plots._running_mean(values)  # window of 4
    assert mean[0] == 0.0 and mean[50] == pytest.approx(np.mean([47, 48, 49, 50]))
    values[49] = np.nan
    assert report_plots._running_mean(values)[50] == pytest.approx(np.mean([47, 48, 50]))


def test_rare_grids_are_summed():
    built = _build()
    built["schemes"][0]["grids"] = {f"{cols}x1": 1 for cols in range(1, 21)}
    built["schemes"][0]["num_images"] = 20
    axes = report_plots.grids_chosen(built).axes[0]
    names = [tick.get_text() for tick in axes.get_xticklabels()]
    assert len(names) == 15 and names[-1] == "other"
    heights = [bar.get_height() for bar in axes.containers[0]]
    assert sum(heights) == pytest.approx(100.0)


def test_table_refuses_ragged_rows():
    with pytest.raises(ValueError, match="1 cells for 2 columns"):
        report_tables.Table(title="t", columns=["a", "b"], rows=[["1"]])
