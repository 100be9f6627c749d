"""Tests of the rendered reading task."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from bluelm_jax.data.rendering import fonts, page_geometry, reading_pages

SIZES = (
    "width,height,source\n"
    "640,480,coco_val2017:1\n"
    "480,640,coco_val2017:2\n"
    "640,160,coco_val2017:3\n"
    "640,150,coco_val2017:4\n"  # 4.3 : 1, beyond max_aspect
    "900,1700,sroie:a.jpg\n"
    "4961,7016,sroie:b.jpg\n"
    "928,2722,sroie:c.jpg\n"
)


@pytest.fixture(name="sizes_path")
def _sizes_path(tmp_path):
    path = tmp_path / "sizes.csv"
    path.write_text(SIZES)
    return path


def _write(folder, cfg, seed, sizes_path, num_pages=6, split="train"):
    folder.mkdir(exist_ok=True)
    reading_pages.write_split(
        folder, cfg, seed=seed, split=split, num_pages=num_pages, sizes_path=sizes_path
    )
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")}


@pytest.mark.parametrize("make", [reading_pages.stage1, reading_pages.stage2])
def test_same_seed_same_bytes(make, tmp_path, sizes_path):
    first = _write(tmp_path / "a", make(), 0, sizes_path)
    again = _write(tmp_path / "b", make(), 0, sizes_path)
    other = _write(tmp_path / "c", make(), 1, sizes_path)
    assert first == again
    assert len(first) == 7
    assert first.keys() == other.keys()
    assert all(first[name] != other[name] for name in first)


def test_pages_do_not_depend_on_how_many_are_made(tmp_path, sizes_path):
    few = _write(tmp_path / "a", reading_pages.stage2(), 0, sizes_path, num_pages=2)
    more = _write(tmp_path / "b", reading_pages.stage2(), 0, sizes_path, num_pages=4)
    assert all(more[name] == few[name] for name in few if name.endswith(".png"))


def test_splits_differ(tmp_path, sizes_path):
    cfg = reading_pages.stage1()
    train = _write(tmp_path / "a", cfg, 0, sizes_path, num_pages=50)
    held_out = _write(tmp_path / "b", cfg, 0, sizes_path, num_pages=50, split="eval")
    texts = [
        {r["conversations"][1]["value"] for r in json.loads(files[name])}
        for files, name in ((train, "stage1_train.json"), (held_out, "stage1_eval.json"))
    ]
    assert len(texts[0]) == 50 and not texts[0] & texts[1]


def test_records_name_existing_images(tmp_path, sizes_path):
    cfg = reading_pages.stage2(prompt="What do you see?", num_digits=6)
    path = reading_pages.write_split(
        tmp_path, cfg, seed=0, split="eval", num_pages=5, sizes_path=sizes_path
    )
    records = json.loads(path.read_text())
    assert [r["id"] for r in records] == [f"stage2-eval-{i:06d}" for i in range(5)]
    for record in records:
        human, gpt = record["conversations"]
        assert human == {"from": "human", "value": "<image>\nWhat do you see?"}
        assert gpt["from"] == "gpt" and len(gpt["value"]) == 6 and gpt["value"].isdigit()
        with Image.open(tmp_path / record["image"]) as image:
            assert image.size == (record["width"], record["height"])
        expected = page_geometry.bucket(record["width"], record["height"], cfg.tile_size)
        assert record["bucket"] == expected


def test_command_writes_what_the_functions_write(tmp_path, sizes_path):
    command = [
        sys.executable, "-m", "experiments.render_data", f"--out={tmp_path / 'command'}",
        "--seed=3", "--num_train=4", "--num_eval=2", "--stage2_height=7,9",
        f"--image_sizes={sizes_path}",
    ]  # fmt: skip
    root = pathlib.Path(__file__).parents[1]
    subprocess.run(command, cwd=root, check=True, capture_output=True)
    for cfg in (reading_pages.stage1(), reading_pages.stage2(stage2_height=(7.0, 9.0))):
        for split, count in (("train", 4), ("eval", 2)):
            _write(tmp_path / "functions", cfg, 3, sizes_path, num_pages=count, split=split)
    written = [
        {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.*")}
        for folder in (tmp_path / "command", tmp_path / "functions")
    ]
    assert len(written[0]) == 4 + 2 * 4 + 2 * 2
    assert written[0] == written[1]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    kind=st.sampled_from(reading_pages.KINDS),
    width=st.integers(60, 400),
    height=st.integers(60, 400),
)
def test_every_cell_holds_its_digit(seed, kind, width, height):
    cfg = getattr(reading_pages, kind)()
    sizes = {name: np.array([[width, height]]) for name in ("coco_val2017", "sroie")}
    page = reading_pages.sample_page(np.random.default_rng(seed), cfg, sizes)
    assert page.rows * page.cols == len(page.text) == cfg.num_digits
    for index, box in enumerate(reading_pages.digit_boxes(page)):
        cell = page.cell(index)
        assert cell[0] <= box[0] and cell[1] <= box[1]
        assert box[2] <= cell[2] and box[3] <= cell[3]
    pixels = np.asarray(reading_pages.render_page(page)).astype(float)
    assert pixels.shape == (page.height, page.width)
    dark = pixels < (page.paper + page.ink) / 2
    covered = np.zeros_like(dark)
    for left, top, right, bottom in reading_pages.digit_boxes(page):
        assert dark[top:bottom, left:right].sum() >= 4
        covered[top:bottom, left:right] = True
    assert not (dark & ~covered).any()


def test_masks_of_the_ten_digits_differ():
    masks = [fonts.digit_mask("DejaVuSans", 12.0, digit) for digit in fonts.DIGITS]
    assert len({(mask.shape, mask.tobytes()) for mask in masks}) == 10


@pytest.mark.parametrize("face", fonts.FACES)
@pytest.mark.parametrize("height", [8.0, 13.3, 40.0])
def test_mask_height_is_what_was_asked(face, height):
    heights = [fonts.digit_mask(face, height, digit).shape[0] for digit in fonts.DIGITS]
    assert height - 1.5 <= max(heights) <= height + 1.5


def test_digit_height_in_canvas_pixels(sizes_path):
    cfg = reading_pages.stage2()
    pages = reading_pages.iter_pages(
        cfg, seed=0, split="train", num_pages=200, sizes_path=sizes_path
    )
    for page in pages:
        scale = page_geometry.canvas_scale(page.width, page.height, cfg.tile_size)
        assert scale == min(1.0, 168 / max(page.width, page.height))
        assert cfg.min_height <= page.digit_height * scale <= 13.0


def test_sizes_are_scaled_and_filtered(sizes_path):
    sizes = reading_pages.page_sizes(reading_pages.stage2(), sizes_path)
    # 56/384 of the size; 4961 x 7016 is first shrunk to 9 tiles, 504 pixels.
    assert sizes["sroie"].tolist() == [[131, 248], [356, 504], [135, 397]]
    assert sizes["coco_val2017"].tolist() == [[93, 70], [70, 93], [93, 23]]


def test_sources_are_mixed_in_the_given_share(sizes_path):
    for share in (0.0, 0.5, 1.0):
        cfg = reading_pages.stage2(receipts_fraction=share)
        pages = reading_pages.iter_pages(
            cfg, seed=0, split="train", num_pages=400, sizes_path=sizes_path
        )
        receipts = sum(max(page.width, page.height) > 93 for page in pages)
        # Four standard deviations of a fair coin's 400 throws.
        assert abs(receipts - 400 * share) <= (40 if share == 0.5 else 0)


def test_the_packaged_sizes_give_every_arrangement():
    cfg = reading_pages.stage2()
    sizes = reading_pages.page_sizes(cfg)
    assert len(sizes["coco_val2017"]) > 4900 and len(sizes["sroie"]) > 600
    pages = reading_pages.iter_pages(cfg, seed=0, split="train", num_pages=1000)
    assert {(p.rows, p.cols) for p in pages} == {(3, 4), (4, 3), (2, 6), (6, 2)}


@pytest.mark.parametrize(
    ("size", "digits", "expected"),
    [
        ((93, 70), 12, (3, 4)),
        ((70, 93), 12, (4, 3)),
        ((60, 60), 12, (3, 4)),
        ((180, 60), 12, (2, 6)),
        ((60, 180), 12, (6, 2)),
        ((56, 56), 8, (2, 4)),  # as square as 4 x 2: more columns win
        ((100, 50), 7, (1, 7)),
    ],
)
def test_arrangement(size, digits, expected):
    assert page_geometry.arrangement(*size, digits) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((93, 70), "landscape-small"),
        ((70, 93), "portrait-small"),
        ((56, 56), "square-small"),
        ((131, 248), "portrait-large"),
        ((60, 168), "tall-medium"),
        ((169, 60), "wide-large"),
    ],
)
def test_bucket(size, expected):
    assert page_geometry.bucket(*size, tile_size=56) == expected


def test_noise_repeats_beyond_its_field():
    window = reading_pages._noise(3, 1030, (5, 7))
    assert np.array_equal(window[:, :6], window[:, 1024:])
    assert np.array_equal(window[:, :100], reading_pages._noise(3, 100, (5, 7)))


def test_stage1_stands_two_by_four_and_four_by_two():
    pages = reading_pages.iter_pages(reading_pages.stage1(), seed=0, split="train", num_pages=100)
    assert {(p.width, p.height, p.rows, p.cols) for p in pages} == {
        (56, 56, 2, 4),
        (56, 56, 4, 2),
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"kind": "stage3"}, "stage3"),
        ({"jitter": 1.5}, "jitter 1.5"),
        ({"stage2_height": (4.0, 9.0)}, "stage2_height"),
        ({"max_aspect": 0.5}, "max_aspect 0.5"),
        ({"num_digits": 0}, "num_digits 0"),
    ],
)
def test_bad_config(overrides, message):
    with pytest.raises(ValueError, match=message):
        reading_pages.PageConfig(**({"kind": "stage2"} | overrides))


def test_a_tile_too_small_for_the_digits():
    cfg = reading_pages.stage1(tile_size=16)
    with pytest.raises(ValueError, match="no arrangement on a 16-pixel tile"):
        reading_pages.sample_page(np.random.default_rng(0), cfg)


def test_unknown_split():
    with pytest.raises(ValueError, match="split 'test'"):
        reading_pages.page_rng(0, "stage1", "test", 0)


def test_unknown_source_names_the_line(tmp_path):
    path = tmp_path / "sizes.csv"
    path.write_text("width,height,source\n1,2,elsewhere:3\n")
    with pytest.raises(ValueError, match=r"sizes\.csv:2: source 'elsewhere'"):
        page_geometry.load_image_sizes(path)


def test_ramp_goes_from_the_easiest_page_to_the_config_itself():
    cfg = reading_pages.stage1(ramp=(10, 20))
    easy, middle = cfg.at(10), cfg.at(15)
    assert (easy.num_faces, easy.max_noise) == (1, 0.0)
    assert easy.stage1_height == (cfg.stage1_height[1], cfg.stage1_height[1])
    assert easy.jitter < middle.jitter < cfg.jitter
    assert cfg.at(20) == cfg and cfg.at(10**6) == cfg
    held_out = reading_pages.iter_pages(cfg, seed=0, split="eval", num_pages=20)
    assert len({page.face for page in held_out}) > 1
