"""Tests of rendering as a whole: workers, interruptions, manifests, the command."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

from bluelm_jax.data.rendering import contact_sheet, font_index, jobs, manifest, shards
from bluelm_jax.data.rendering.sampling import MAX_NAMES, Drop, Drops, Sample, encode

ROOT = pathlib.Path(__file__).parents[1]
FONTS = str(font_index.matplotlib_folder())


class Squares:
    """A task that draws nothing but a number's grey, and can be told to fail."""

    kind = "text"

    def __init__(self, side=3, interrupt_at=-1):
        self.side, self.interrupt_at = side, interrupt_at
        self.drawn = []

    def sample(self, rng, index):
        if index == self.interrupt_at:
            raise KeyboardInterrupt
        if index % 50 == 7:
            raise ValueError("seven")
        if index % 50 == 8:
            return Drop("eight", f"sample {index}")
        self.drawn.append(index)
        grey = int(rng.integers(256))
        data, suffix = encode(Image.new("L", (self.side, self.side), grey), None)
        meta = {"language": "en", "fonts": ["none"]}
        return Sample(
            image=data,
            suffix=suffix,
            width=self.side,
            height=self.side,
            prompt="<image>\nHow grey?",
            answer=str(grey),
            meta=meta,
        )

    def settings(self):
        return {"side": self.side}

    def licences(self):
        return {"none": "free"}

    def prepared(self):
        return {"before": {"count": 2, "names": ["a", "b"]}}


def _files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in pathlib.Path(folder).rglob("*")
        if path.is_file()
    }


def test_records_and_manifest(tmp_path):
    result = shards.render(Squares(), tmp_path, seed=4, count=120)
    records = json.loads((tmp_path / "text.json").read_text(encoding="utf-8"))
    assert [r["id"] for r in records[:9]] == [f"text-{i:07d}" for i in (*range(7), 9, 10)]
    assert len(records) == result["written"] == 120 - 2 * 3
    for record in records:
        assert record["conversations"][0] == {"from": "human", "value": "<image>\nHow grey?"}
        with Image.open(tmp_path / record["image"]) as image:
            assert image.size == (record["width"], record["height"]) == (3, 3)
            assert record["conversations"][1]["value"] == str(image.getpixel((0, 0)))
    stored = json.loads((tmp_path / "text" / "manifest.json").read_text(encoding="utf-8"))
    assert stored == result
    assert stored["left_out"] == {
        "ValueError while drawing": {
            "count": 3,
            "names": [f"sample {i}: seven" for i in (7, 57, 107)],
        },
        "before": {"count": 2, "names": ["a", "b"]},
        "eight": {"count": 3, "names": [f"sample {i}" for i in (8, 58, 108)]},
    }
    assert stored["settings"] == {"seed": 4, "count": 120, "side": 3}
    assert stored["fonts"] == {"none": {"images": len(records), "licence": "free"}}
    assert stored["languages"] == {"en": len(records)} and stored["formats"] == {"png": 114}
    assert stored["version"] == manifest.VERSION and stored["software"]["pillow"] != "absent"
    assert not (tmp_path / "text" / "parts").exists()


def test_an_interrupted_rendering_goes_on(tmp_path):
    shards.render(Squares(), tmp_path / "whole", seed=0, count=350)
    with pytest.raises(KeyboardInterrupt):
        shards.render(Squares(interrupt_at=230), tmp_path / "broken", seed=0, count=350)
    assert not (tmp_path / "broken" / "text.json").exists()
    again, steps = Squares(), []
    shards.render(again, tmp_path / "broken", seed=0, count=350, progress=steps.append)
    assert min(again.drawn) == 200 and steps == [200, 300, 350]
    assert _files(tmp_path / "broken") == _files(tmp_path / "whole")
    third, steps = Squares(), []
    shards.render(third, tmp_path / "broken", seed=0, count=350, progress=steps.append)
    assert third.drawn == [] and steps == [350]


def test_a_kill_between_records_and_manifest(tmp_path, monkeypatch):
    shards.render(Squares(), tmp_path / "whole", seed=0, count=150)
    with monkeypatch.context() as patch:
        patch.setattr(manifest.Tally, "manifest", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            shards.render(Squares(), tmp_path / "broken", seed=0, count=150)
    assert (tmp_path / "broken" / "text.json").exists()
    again = Squares()
    shards.render(again, tmp_path / "broken", seed=0, count=150)
    assert again.drawn == [] and _files(tmp_path / "broken") == _files(tmp_path / "whole")


def test_missing_and_damaged_images_are_drawn_again(tmp_path, monkeypatch):
    shards.render(Squares(), tmp_path / "whole", seed=0, count=350)
    with pytest.raises(KeyboardInterrupt):
        shards.render(Squares(interrupt_at=330), tmp_path / "out", seed=0, count=350)
    images = tmp_path / "out" / "text"
    (images / "000000" / "0000003.png").write_bytes(b"")
    (images / "000002" / "0000203.png").unlink()
    again, steps = Squares(), []
    shards.render(again, tmp_path / "out", seed=0, count=350, progress=steps.append)
    assert {i // 100 for i in again.drawn} == {0, 2, 3} and steps[0] == 100
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")
    (images / "000001" / "0000103.png").unlink()  # Of a finished rendering.
    finished, steps = Squares(), []
    shards.render(finished, tmp_path / "out", seed=0, count=350, progress=steps.append)
    assert {i // 100 for i in finished.drawn} == {1} and steps == [250, 350]
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")
    (tmp_path / "out" / "text.json").unlink()
    shards.render(Squares(), tmp_path / "out", seed=0, count=350)
    assert _files(tmp_path / "out") == _files(tmp_path / "whole")
    (images / "000001" / "0000103.png").unlink()
    monkeypatch.setattr(manifest, "software", lambda kind: {"pillow": "0"})
    with pytest.raises(ValueError, match="000001: images are missing or damaged, and other soft"):
        shards.render(Squares(), tmp_path / "out", seed=0, count=350)


def test_nothing_drawn_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(Squares, "sample", lambda *_: Drop("bad page", "page 1"))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"none of 9 samples can be drawn: .*9 x bad page \("):
            shards.render(Squares(), tmp_path, seed=0, count=9)
    assert not (tmp_path / "text.json").exists()


def test_other_settings_are_refused(tmp_path, monkeypatch):
    shards.render(Squares(), tmp_path, seed=0, count=5)
    for changed, seed, count in ((Squares(side=4), 0, 5), (Squares(), 1, 5), (Squares(), 0, 6)):
        with pytest.raises(ValueError, match=r"samples of other settings: (side 3|seed 0|count 5)"):
            shards.render(changed, tmp_path, seed=seed, count=count)
    with pytest.raises(KeyboardInterrupt):
        shards.render(Squares(interrupt_at=1), tmp_path / "b", seed=0, count=5)
    monkeypatch.setattr(manifest, "software", lambda kind: {"pillow": "0"})
    with pytest.raises(ValueError, match=r"pillow '[\d.]+' -> '0'"):
        shards.render(Squares(), tmp_path / "b", seed=0, count=5)
    (tmp_path / "c" / "text").mkdir(parents=True)
    (tmp_path / "c" / "text" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="another origin"):
        shards.render(Squares(), tmp_path / "c", seed=0, count=5)
    (tmp_path / "text" / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match=r"manifest\.json.*remove the folder"):
        shards.render(Squares(), tmp_path, seed=0, count=5)


def test_samples_depend_on_nothing_but_seed_and_index(tmp_path):
    """Two processes write what one writes, and the first images are those of a shorter run."""
    task = jobs.make_task("text", folders=[FONTS])
    one, two, few = tmp_path / "one", tmp_path / "two", tmp_path / "few"
    shards.render(task, one, seed=3, count=130)
    shards.render(task, two, seed=3, count=130, workers=2)
    shards.render(task, few, seed=3, count=10)
    assert _files(one) == _files(two)
    whole = _files(one)
    images = {name: data for name, data in _files(few).items() if not name.endswith(".json")}
    assert len(images) == 10 and all(whole[name] == data for name, data in images.items())
    first, other = (shards.sample_rng(seed, "text", 0).random() for seed in (3, 4))
    assert first != other != shards.sample_rng(3, "pdf", 0).random()


@pytest.mark.parametrize("kind", ["formulas", "markdown"])
def test_same_seed_same_bytes(kind, tmp_path):
    for name in ("a", "b"):
        shards.render(jobs.make_task(kind, folders=[FONTS]), tmp_path / name, seed=1, count=8)
    shards.render(jobs.make_task(kind, folders=[FONTS]), tmp_path / "c", seed=2, count=8)
    first, again, other = (_files(tmp_path / name) for name in "abc")
    assert first == again and len(first) == 10
    shared = [name for name in first.keys() & other.keys() if "/0000" in name]
    assert all(first[name] != other[name] for name in shared)


def test_names_of_drops_are_bounded():
    drops = Drops()
    for i in range(3 * MAX_NAMES):
        drops.add("reason", str(i))
    counted = drops.to_plain()["reason"]
    assert counted["count"] == 3 * MAX_NAMES and counted["names"] == list(
        map(str, range(MAX_NAMES))
    )


def test_contact_sheet():
    images = [Image.new("RGB", (size, 40), (250, 0, 0)) for size in (30, 500, 90, 200)]
    sheet = np.asarray(contact_sheet.sheet(images, width=300, row=20, gap=5))
    assert sheet.shape[1] == 300
    red = (sheet == (250, 0, 0)).all(axis=2)
    assert red.sum() == 15 * 20 + 250 * 20 + 45 * 20 + 100 * 20
    with pytest.raises(ValueError, match="at least one"):
        contact_sheet.sheet([])


def _command(*arguments, **options):
    command = [sys.executable, "-m", "experiments.render_data", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def test_command(tmp_path):
    (tmp_path / "in.txt").write_text("A line of my own.\n", encoding="utf-8")
    arguments = [
        "--kind=text", "--count=6", f"--out={tmp_path}", f"--input={tmp_path / 'in.txt'}",
        f"--fonts={FONTS}", "--families=^DejaVu Sans$", "--sizes=20,22", "--noise=0",
        f"--contact_sheet={tmp_path / 'sheet.png'}", "--contact_images=4",
    ]  # fmt: skip
    done = _command(*arguments)
    assert done.returncode == 0, done.stderr
    assert "6 of 6 samples, 0 of them drawn before" in done.stdout
    records = json.loads((tmp_path / "text.json").read_text(encoding="utf-8"))
    assert {record["conversations"][1]["value"] for record in records} == {"A line of my own."}
    for record in records:
        assert record["meta"]["fonts"][0].startswith("DejaVu Sans ")
        assert 20 <= record["meta"]["size_px"] <= 22 and record["image"].endswith(".png")
    assert (tmp_path / "sheet.png").stat().st_size > 1000
    assert "6 of 6 samples, 6 of them drawn before" in _command(*arguments).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kind=text", "--num_train=3"], "--kind=text has no use for --num_train"),
        (["--kind=stage1", "--workers=2"], "--kind=stage1 has no use for --workers"),
        (["--kind=pages", "--count=2", "--num_train=3"], "give one"),
        (["--kind=pdf"], "--input=FILE_OR_FOLDER"),
        (["--kind=text", "--input=/nowhere"], "input /nowhere: no such file"),
        (["--kind=text", "--sizes=30,20"], "sizes (30, 20): must rise"),
        (["--kind=formulas", "--sizes=a"], "two whole numbers"),
    ],
)
def test_problems_end_in_one_line(arguments, message, tmp_path):
    done = _command(f"--out={tmp_path}", *arguments)
    assert done.returncode == 1 and len(done.stderr.strip().splitlines()) == 1
    assert message in done.stderr


def test_count_is_for_the_reading_pages_too(tmp_path):
    done = _command(f"--out={tmp_path}", "--kind=stage1", "--count=3", "--num_eval=1")
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "stage1_train.json").read_text())) == 3


@pytest.mark.skipif(os.name != "posix", reason="signals to a process group")
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_ends_cleanly(workers, tmp_path):
    command = [
        sys.executable, "-m", "experiments.render_data", "--kind=text", "--count=1000000",
        f"--workers={workers}", f"--out={tmp_path}", f"--fonts={FONTS}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 100
        while not list(tmp_path.glob("text/parts/0*.json")):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 130
    assert errors.strip().splitlines()[-1] == "stopped; the same command goes on from here"
    assert "Traceback" not in errors
    assert not (tmp_path / "text" / "manifest.json").exists()
