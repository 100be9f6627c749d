"""Tests of the choice of faces: coverage, styles, regions, unreadable files."""

import dataclasses

import pytest
from fontTools.ttLib import TTFont
from PIL import ImageFont

from bluelm_jax.data.rendering import character_map, corpus, font_index


@pytest.fixture(name="dejavu", scope="module")
def _dejavu():
    alphabet = corpus.alphabet(corpus.builtin())
    return font_index.scan(alphabet, [font_index.matplotlib_folder()], "^DejaVu")


@pytest.fixture(name="installed", scope="module")
def _installed():
    return font_index.scan(corpus.alphabet(corpus.builtin()))


def _face(index, name):
    return next(face for face in index.faces if face.name.startswith(name))


@pytest.mark.parametrize("file", ["DejaVuSans", "DejaVuSansMono-Bold", "STIXGeneral", "cmr10"])
def test_character_map_equals_fonttools(file):
    codes = set(range(0x20, 0x3000)) | {0x1D538, 0x1F600, 0xFFFF}
    with TTFont(font_index.matplotlib_folder() / f"{file}.ttf", lazy=True) as font:
        assert character_map.covered(font, codes) == codes & set(font.getBestCmap())
        assert character_map.covered(font, set()) == frozenset()


def test_scan_finds_styles_and_leaves_out_what_is_no_text_face(dejavu):
    face = _face(dejavu, "DejaVu Sans Bold Oblique")
    assert face.bold and face.slanted and not face.mono and face.licence
    everything = font_index.scan({"a"}, [font_index.matplotlib_folder()])
    families = {face.family for face in everything.faces}
    assert "STIXGeneral" in families
    assert not {name for name in families if name.startswith(("cm", "STIXSiz", "Last"))}


def test_faces_are_chosen_by_coverage():
    asked = set("Ünï — ё漢字مرحباשלום")
    dejavu = font_index.scan(asked, [font_index.matplotlib_folder()], "^DejaVu")
    assert dejavu.numbers("Ünï — ё", "en")
    assert dejavu.numbers("漢字", "zh") == () and dejavu.uncovered("ё漢字") == "字漢"
    for text, language in (("مرحبا", "ar"), ("שלום", "he")):
        families = {dejavu.faces[number].family for number in dejavu.numbers(text, language)}
        assert "DejaVu Sans" in families and "DejaVu Serif" not in families


def test_han_forms_of_the_region():
    face = dataclasses.replace(
        font_index.scan({"a"}, [font_index.matplotlib_folder()]).faces[0], family="Some Sans CJK JP"
    )
    index = font_index.FontIndex(faces=(face,), covers={"字": 1})
    assert index.numbers("字", "ja") == (0,) and index.numbers("字", "en") == (0,)
    assert index.numbers("字", "zh") == index.numbers("字", "ko") == ()


def test_no_box_of_a_missing_glyph(installed):
    """Every face that is offered for a language draws each of its characters as something."""
    checked = 0
    for passage in corpus.builtin():
        text = "".join(passage.lines)
        for number in installed.numbers(text, passage.language)[:6]:
            face = installed.faces[number]
            font = ImageFont.truetype(
                face.path, 24, index=face.index, layout_engine=ImageFont.Layout.BASIC
            )
            box = font.getmask("\uffff")
            box = box.size, bytes(box)
            masks = (
                (char, font.getmask(char)) for char in sorted(set(text) - set(" \u200c\u200d"))
            )
            boxes = [char for char, mask in masks if (mask.size, bytes(mask)) == box]
            assert not boxes, f"{face.name}: {boxes}"
            checked += 1
    assert checked >= 6  # DejaVu alone has German, English, ...


def test_fonts_that_cannot_be_read_are_named(tmp_path):
    good = font_index.matplotlib_folder() / "DejaVuSans.ttf"
    (tmp_path / "good.ttf").write_bytes(good.read_bytes())
    (tmp_path / "cut.ttf").write_bytes(good.read_bytes()[:5000])
    (tmp_path / "text.otf").write_text("no font")
    index = font_index.scan({"a"}, [tmp_path])
    assert [face.family for face in index.faces] == ["DejaVu Sans"]
    assert sorted(line.split(":")[0] for line in index.failed) == ["cut.ttf", "text.otf"]
    with pytest.raises(ValueError, match="no usable face of family 'Nothing'"):
        font_index.scan({"a"}, [tmp_path], "Nothing")
    with pytest.raises(ValueError, match="no such folder"):
        font_index.scan({"a"}, [tmp_path / "missing"])
    with pytest.raises(ValueError, match="no regular expression"):
        font_index.scan({"a"}, [tmp_path], "(")
