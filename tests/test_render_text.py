"""Tests of drawn text: scripts, line breaking, choice of faces, blocks."""

# ruff: noqa: RUF001

import dataclasses
import itertools
import pathlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from bluelm_jax.data.rendering import (
    corpus,
    font_index,
    jobs,
    line_breaking,
    looks,
    scripts,
    shards,
    text_block,
    text_images,
)
from bluelm_jax.data.rendering.sampling import Drop, Drops, Sample

needs_raqm = pytest.mark.skipif(not scripts.has_raqm(), reason=scripts.RAQM_MISSING)


@pytest.fixture(name="dejavu", scope="module")
def _dejavu():
    alphabet = corpus.alphabet(corpus.builtin())
    return font_index.scan(alphabet, [font_index.matplotlib_folder()], "^DejaVu")


@pytest.fixture(name="installed", scope="module")
def _installed():
    return font_index.scan(corpus.alphabet(corpus.builtin()))


def _face(index, name):
    return next(face for face in index.faces if face.name.startswith(name))


def test_builtin_sentences_are_what_they_should_be():
    passages = corpus.builtin()
    assert {"ar", "el", "en", "he", "hi", "ja", "ko", "ru", "th", "zh"} <= {
        passage.language for passage in passages
    }
    assert len(passages) >= 15
    for passage in passages:
        assert len(passage.lines) >= 20 and all(passage.lines)
        assert len(set(passage.lines)) == len(passage.lines)
        assert all(scripts.clean(line) == line for line in passage.lines)
        guessed = {scripts.language_of(line) for line in passage.lines}
        # A script stands for one language; a Japanese sentence has kana, a Chinese one has none.
        assert guessed == ({passage.language} if passage.language in scripts._LANGUAGE.values()
                           else {"en"})  # fmt: skip


@pytest.mark.parametrize("task", ["text", "formulas", "table", "markdown", "pdf"])
def test_instructions(task):
    english = corpus.instructions(task, "en")
    assert len(english) >= 3 and corpus.instructions(task, "und") == english
    assert corpus.instructions(task, "zh-Hant") != english


@pytest.mark.parametrize(
    ("text", "shaping", "way", "language"),
    [
        ("Straße, naïve, 25 °C", False, "ltr", "en"),
        ("«Привет»", False, "ltr", "ru"),
        ("12 שלום", True, "rtl", "he"),
        ("مرحبا 12", True, "rtl", "ar"),
        ("नमस्ते", True, "ltr", "hi"),
        ("ที่นี่", True, "ltr", "th"),
        ("漢字とかな", False, "ltr", "ja"),
        ("汉字", False, "ltr", "zh"),
        ("한글 漢字", False, "ltr", "ko"),
        ("x\u0323\u030a", True, "ltr", "en"),  # marks that no composed letter has
        ("12:30 + 4", False, "ltr", "en"),
        ("ქართული", False, "ltr", "und"),
    ],
)
def test_script(text, shaping, way, language):
    found = scripts.needs_shaping(text), scripts.direction(text), scripts.language_of(text)
    assert found == (shaping, way, language)


def test_clean():
    assert scripts.clean("a\u0308\r\nb\t\x07c\u00ad\ufeff\u200bd") == "ä\nb cd"
    assert scripts.clean("می\u200cخواهم") == "می\u200cخواهم"


@pytest.mark.parametrize(
    ("text", "limit", "lines"),
    [
        ("aaa bb cc", 6, ["aaa bb", "cc"]),
        ("a bbbbbbb c", 3, ["a b", "bbb", "bbb", "c"]),
        ("天地玄黄。宇宙", 4, ["天地玄", "黄。宇宙"]),  # the full stop takes its character along
        ("彼は「犬」と", 3, ["彼は", "「犬」", "と"]),
        ("コーヒーをカップ", 4, ["コーヒー", "をカップ"]),
        ("Python言語3を", 6, ["Python", "言語3を"]),
        ("한국어 낱말은 붙는다", 7, ["한국어 낱말은", "붙는다"]),
        ("e\u0301e\u0301e\u0301", 4, ["e\u0301e\u0301", "e\u0301"]),
        ("", 5, []),
    ],
)
def test_wrap(text, limit, lines):
    assert line_breaking.wrap(text, limit, len) == lines


@given(
    text=st.text(alphabet="ab ,.「」。っー漢字かな한글\u0301", max_size=40),
    limit=st.integers(1, 12),
)
def test_wrap_loses_nothing_and_keeps_kinsoku(text, limit):
    lines = line_breaking.wrap(text, limit, len)
    assert "".join(lines).replace(" ", "") == "".join(text.split())
    assert all(line == line.strip(" ") and line for line in lines)
    if max((len(piece) for piece in line_breaking.pieces(text)), default=0) <= limit:
        assert all(len(line) <= limit for line in lines)
        words = set(text.split())
        for before, after in itertools.pairwise(lines):
            whole = any(word.startswith(after[0]) for word in words)
            assert whole or line_breaking.break_allowed(before[-1], after[0])


def test_block_is_as_large_as_its_ink(dejavu):
    setter = text_block.Setter(_face(dejavu, "DejaVu Sans Book"), 24, False)
    mask = setter.draw(["fjord", "Agy Äç"], 500.0, spacing=1.2, margin=7, align="start")
    left, top, right, bottom = mask.getbbox()
    assert left == 7 and right == mask.width - 7
    assert top >= 7 and bottom <= mask.height - 7
    rows = np.asarray(mask).max(axis=1)
    gaps = (np.diff((rows > 0).astype(int)) == -1).sum()
    assert gaps >= 2  # lines do not touch


@needs_raqm
def test_right_to_left(dejavu):
    setter = text_block.Setter(_face(dejavu, "DejaVu Sans Book"), 30, True)
    long, short = "שלום לכולם", "אב"
    mask = np.asarray(setter.draw([long, short], 900.0, spacing=1.3, margin=5, align="start"))
    assert (mask[-30:, -20:] > 0).any() and not (mask[-30:, :40] > 0).any()  # right-aligned
    # alef comes first, so it stands right: the last columns of the word are those of alef alone.
    alef, word = setter.line("א", "rtl").ink, setter.line("אב", "rtl").ink
    tail = np.asarray(word)[-alef.height :, -alef.width :]
    assert np.abs(tail.astype(int) - np.asarray(alef).astype(int)).mean() < 8


@needs_raqm
def test_arabic_letters_join(dejavu):
    setter = text_block.Setter(_face(dejavu, "DejaVu Sans Book"), 30, True)
    columns = (np.asarray(setter.line("سلم", "rtl").ink) > 0).any(axis=0)
    assert columns.all()  # three letters, one stroke
    apart = text_block.Setter(_face(dejavu, "DejaVu Sans Book"), 30, False).line("سلم")
    assert setter.line("سلم", "rtl").ink.tobytes() != apart.ink.tobytes()


def _task(**kwargs):
    return jobs.make_task("text", folders=[str(font_index.matplotlib_folder())], **kwargs)


def test_samples(tmp_path):
    task = _task(noise=1.0)
    samples = [task.sample(shards.sample_rng(5, "text", i), i) for i in range(60)]
    assert all(isinstance(sample, Sample) for sample in samples)
    lines = {line for passage in corpus.builtin() for line in passage.lines}
    for sample in samples:
        assert sample.prompt.count("<image>") == 1 and sample.meta["fonts"]
        assert max(sample.width, sample.height) <= 1536
        assert any(line in sample.answer for line in lines)
    assert {sample.suffix for sample in samples} == {".png", ".jpg"}
    assert len({sample.meta["language"] for sample in samples}) >= 6
    aspects = [sample.width / sample.height for sample in samples]
    assert min(aspects) < 1 < 2.5 < max(aspects)
    left_out = task.prepared()["no installed face covers it"]["names"]
    assert {"zh", "ja", "ko"} <= set(left_out)


def test_without_raqm_other_languages_are_drawn(monkeypatch):
    monkeypatch.setattr(scripts, "has_raqm", lambda: False)
    task = _task()
    assert set(task.prepared()["needs Raqm layout, which Pillow has not here"]["names"]) == {
        "ar", "he", "hi", "th",
    }  # fmt: skip
    assert isinstance(task.sample(shards.sample_rng(0, "text", 0), 0), Sample)


def test_without_raqm_nothing_to_draw_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(scripts, "has_raqm", lambda: False)
    (tmp_path / "a.txt").write_text("שלום לכולם", encoding="utf-8")
    with pytest.raises(ValueError, match="apt install libfribidi0"):
        _task(inputs=[str(tmp_path)])


def test_characters_that_no_face_has_are_named(dejavu):
    passage = corpus.Passage("a.txt", "en", ("plain", "\U000e0100 \U0001f9ff"))
    task = text_images.TextTask((passage,), dejavu, text_images.TextConfig(max_lines=1), {}, True)
    drop = text_images.TextTask(
        (dataclasses.replace(passage, lines=passage.lines[1:]),),
        dejavu,
        text_images.TextConfig(),
        {},
        True,
    ).sample(shards.sample_rng(0, "text", 0), 0)
    assert drop == Drop("no face covers the characters", "a.txt: U+1F9FF U+E0100")
    assert isinstance(task.sample(shards.sample_rng(0, "text", 0), 0), Sample)


def test_input_files(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree" + " x" * 300, encoding="utf-8-sig")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "vier", "language": "de"}\n{"no": 1}\nnothing\n[1]\n', encoding="utf-8"
    )
    (tmp_path / "c.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "other.bin").write_bytes(b"")
    drops = Drops()
    first, second, fourth = corpus.load([str(tmp_path)], drops, max_chars=100)
    assert first.lines == ("one", "two") and fourth == corpus.Passage("b.jsonl:1", "de", ("vier",))
    assert all(len(line) <= 100 for line in second.lines) and len(second.lines) == 7
    counted = drops.to_plain()
    assert counted["unreadable input file"]["count"] == 1
    assert counted['input line that is no JSON object with a "text"']["names"] == [
        "b.jsonl:2", "b.jsonl:3", "b.jsonl:4",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no such file"):
        corpus.load([str(tmp_path / "missing")], drops)
    with pytest.raises(ValueError, match="no text in it"):
        corpus.load([str(tmp_path / "c.txt")], drops)


def test_cjk_is_drawn_where_a_font_is_installed(installed):
    passages = [p for p in corpus.builtin() if p.language in ("zh", "ja", "ko")]
    covering = {p.language: installed.numbers("".join(p.lines), p.language) for p in passages}
    if not all(covering.values()):
        pytest.skip(f"no Chinese, Japanese and Korean font on this machine: {covering}")
    task = text_images.TextTask(tuple(passages), installed, text_images.TextConfig(), {}, False)
    for i in range(10):
        sample = task.sample(shards.sample_rng(0, "text", i), i)
        assert isinstance(sample, Sample) and sample.meta["language"] in covering


@given(seed=st.integers(0, 2**32 - 1))
def test_looks_stay_legible(seed):
    look = looks.sample(np.random.default_rng(seed), 1.0, text_px=14)
    assert abs(looks.luminance(look.ink) - looks.luminance(look.paper)) >= 89
    assert look.blur <= 0.7 and abs(look.rotation) <= 2.5
    assert look.jpeg_quality is None or 35 <= look.jpeg_quality <= 95
    clean = looks.sample(np.random.default_rng(seed), 0.0)
    assert clean.meta() == {}
    assert abs(looks.luminance(clean.ink) - looks.luminance(clean.paper)) >= 169


def test_colours_are_mixed_alike_in_every_mode():
    mask = Image.linear_gradient("L")
    tinted = looks.Look(ink=(10, 200, 30), paper=(255, 240, 225))
    palette = looks.colourise(mask, tinted)
    full = looks.colourise(mask, dataclasses.replace(tinted, jpeg_quality=50))
    grey = looks.colourise(mask, looks.Look(ink=(9, 9, 9), paper=(250, 250, 250)))
    assert (palette.mode, full.mode, grey.mode) == ("P", "RGB", "L")
    assert looks.finish(palette, tinted) is palette
    both = [np.asarray(image.convert("RGB")).astype(int) for image in (palette, full)]
    assert np.abs(both[0] - both[1]).max() <= 1
    assert np.asarray(grey)[0, 0] == 250 and np.asarray(grey)[-1, 0] == 9


def test_package_has_the_assets():
    folder = pathlib.Path(corpus.__file__).parents[1] / "assets"
    assert (folder / "instructions.json").is_file() and len(list(folder.glob("sentences/*"))) >= 15
