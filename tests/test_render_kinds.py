"""Tests of rendered formulas, Markdown and PDF pages."""

import dataclasses
import io
import itertools
import sys

import numpy as np
import pytest
from PIL import Image

from bluelm_jax.data.rendering import (
    font_index,
    formula_grammar,
    formulas,
    jobs,
    looks,
    markdown_blocks,
    markdown_images,
    markdown_source,
    markdown_tree,
    scripts,
    shards,
)
from bluelm_jax.data.rendering.markdown_inline import Faces, Typesetter
from bluelm_jax.data.rendering.markdown_page import PageStyle
from bluelm_jax.data.rendering.markdown_tree import Run
from bluelm_jax.data.rendering.sampling import Drop, Drops, Sample

FONTS = [str(font_index.matplotlib_folder())]


def _samples(task, count, seed=0):
    return [task.sample(shards.sample_rng(seed, task.kind, i), i) for i in range(count)]


# Formulas.


def test_every_formula_of_the_grammar_can_be_drawn():
    drawn = set()
    for seed in range(120):
        text = formula_grammar.formula(np.random.default_rng(seed), max_depth=seed % 4)
        image, below = formulas.draw(text, 20, formulas.FONT_SETS[seed % 5])
        assert np.asarray(image).max() > 100 and 0 <= below < image.height
        drawn.add(text)
    assert len(drawn) > 110
    everything = " ".join(drawn)
    for command in (r"\frac", r"\sqrt", r"\sum", r"\int", r"\lim", r"\left(", "_{", "^{"):
        assert command in everything
    assert not any(len(text) > 160 for text in drawn if "\\frac" in text)


@pytest.mark.parametrize("symbol", [*formula_grammar._GREEK, *formula_grammar._FUNCTIONS,
                                    *formula_grammar._RELATIONS])  # fmt: skip
def test_every_symbol_has_a_glyph_in_every_font_set(symbol):
    for font_set in formulas.FONT_SETS:
        formulas.draw(f"x {symbol} y", 16, font_set)


@pytest.mark.parametrize("bad", [r"\frac{1}{", r"\nosuchcommand", "x_1_2", "公式"])
def test_formulas_that_cannot_be_drawn(bad):
    with pytest.raises(formulas.FormulaError):
        formulas.draw(bad, 16, "cm")


def test_formula_lists(tmp_path):
    (tmp_path / "a.tex").write_text("$a + b$\n\n\\[ \\frac{1}{2} \\]\n\\nosuch\n")
    (tmp_path / "b.jsonl").write_text('{"text": "x^2"}\n')
    drops = Drops()
    given = formulas.load((str(tmp_path),), drops)
    assert [text for _, text in given] == ["a + b", r"\frac{1}{2}", r"\nosuch", "x^2"]
    samples = _samples(formulas.FormulaTask(formulas.FormulaConfig(), given), 20)
    answers = {sample.answer for sample in samples}
    assert answers == {"a + b", r"\frac{1}{2}", "x^2"}
    (drop,) = _samples(formulas.FormulaTask(formulas.FormulaConfig(), given[2:3]), 1)
    assert isinstance(drop, Drop) and "nosuch" in drop.name


def test_wide_formulas_get_smaller():
    cfg = formulas.FormulaConfig(sizes=(10, 40), max_side=400, noise=0.0)
    for sample in _samples(formulas.FormulaTask(cfg, (("long", "+".join("abcdefghijk")),)), 5):
        assert isinstance(sample, Sample) and sample.width <= 400


# Markdown.


def test_runs():
    (paragraph,) = markdown_tree.parse("a **b *c*** `d` ~~e~~ $x_1*y_2*$ cost $5 and $6\nf")
    runs = [run for run in markdown_tree.runs(paragraph) if run.text.strip()]
    assert runs == [
        Run("a "), Run("b ", bold=True), Run("c", bold=True, italic=True), Run("d", code=True),
        Run("e", strike=True), Run("x_1*y_2*", math=True), Run(" cost $5 and $6"), Run("f"),
    ]  # fmt: skip


def test_blocks_are_cut_where_they_end():
    source = "# T\n\ntext\ngoes on\n\n- a\n- b\n\n| h |\n|---|\n| 1 |\n\n```\nx\n\ny\n```\n> q"
    blocks = markdown_tree.split_blocks(source)
    assert blocks == [
        "# T", "text\ngoes on", "- a\n- b", "| h |\n|---|\n| 1 |", "```\nx\n\ny\n```", "> q",
    ]  # fmt: skip
    assert [node.type for node in markdown_tree.parse(source)] == [
        "heading", "paragraph", "bullet_list", "table", "fence", "blockquote",
    ]  # fmt: skip


@pytest.mark.parametrize("language", ["en", "de", "zh", "ru"])
def test_generated_tables_are_tables(language):
    for seed in range(40):
        source = markdown_source.table(np.random.default_rng(seed), language)
        (node,) = markdown_tree.parse(source)
        assert node.type == "table"
        rows = [row for part in node.children for row in part.children]
        assert len(rows) == source.count("\n")  # all lines but the marks
        assert {len(row.children) for row in rows} == {source.split("\n")[0].count("|") - 1}


def test_generated_pages_parse_into_their_blocks():
    for seed in range(60):
        source = markdown_source.document(np.random.default_rng(seed))
        assert "\n\n".join(markdown_tree.split_blocks(source)) == source
        assert not {node.type for node in markdown_tree.parse(source)} & {"html_block"}


@pytest.fixture(name="setter", scope="module")
def _setter():
    index = font_index.scan(set("a"), FONTS, "^DejaVu Sans")
    sans = [face for face in index.faces if face.family == "DejaVu Sans"]
    mono = next(face for face in index.faces if face.mono and not face.bold)
    return Typesetter(Faces(sans, mono, "dejavusans"), 20)


def _page(setter, source, width=400, table="grid"):
    return markdown_blocks.layout(
        markdown_tree.parse(source), setter, PageStyle(width=width, table=table)
    )


def test_styles_choose_faces(setter):
    styles = {
        (bold, italic): setter.faces.style(Run("", bold=bold, italic=italic))
        for bold in (False, True)
        for italic in (False, True)
    }
    for (bold, italic), styled in styles.items():
        assert (styled.face.bold, styled.face.slanted) == (bold, italic)
        assert not styled.embolden and not styled.slant
    plain = Faces([styles[False, False].face], None, "cm").style(Run("", bold=True, italic=True))
    assert plain.embolden and plain.slant


def test_imitated_styles_change_the_ink(setter):
    plain = setter.faces.style(Run("")).face
    alone = Typesetter(Faces([plain], None, "cm"), 20)
    upright = alone.piece("Hl", Run(""))
    bold, italic = alone.piece("Hl", Run("", bold=True)), alone.piece("Hl", Run("", italic=True))
    assert np.sum(bold.ink) > 1.2 * np.sum(upright.ink)
    assert italic.ink.width > upright.ink.width + 2 and italic.ink.height == upright.ink.height
    assert 0.9 < np.sum(italic.ink) / np.sum(upright.ink) < 1.1


def test_spaces_around_formulas_and_styles(setter):
    for source in ("so $x$ is", "so *x* is", "so `x` is", "so **x** is"):
        ((line, _, _),) = _page(setter, source).texts
        tight = _page(setter, source.replace(" ", "")).texts[0][0]
        space = setter.piece("i i", Run("")).advance - setter.piece("ii", Run("")).advance
        assert line.width - tight.width == pytest.approx(2 * space, abs=4)


def test_lines_fit_and_stand_below_each_other(setter):
    page = _page(setter, "one two $\\frac{a}{b}$ three **four** five six seven eight", width=150)
    assert len(page.texts) >= 3
    tops = [(y - line.ascent, y + line.descent) for line, _, y in page.texts]
    assert all(above[1] <= below[0] for above, below in itertools.pairwise(tops))
    assert all(x + line.width <= 150 + 2 for line, x, _ in page.texts)


def test_cells_are_aligned(setter):
    source = "| wide header | wide header | wide header |\n|:--|:-:|--:|\n| a | a | a |"
    page = _page(setter, source, width=900)
    header, cells = page.texts[:3], page.texts[3:]
    starts = [x for _, x, _ in header]
    ends = [x + line.width for line, x, _ in header]
    left, centre, right = ((x, x + line.width) for line, x, _ in cells)
    assert left[0] == pytest.approx(starts[0], abs=2)
    assert sum(centre) == pytest.approx(starts[1] + ends[1], abs=3)
    assert right[1] == pytest.approx(ends[2], abs=2)


def test_a_table_wider_than_the_page_breaks_its_cells(setter):
    source = f"| a | b |\n|---|---|\n| {'word ' * 20}| x |"
    assert _page(setter, source, width=300).right <= 302
    assert _page(setter, source, width=2000).right > 900


def test_ink_is_inside_the_page(setter):
    source = "# *fjÄg* $\\int_a^b$\n\n1. j\n   - `code`\n\n> quote\n\n| a |\n|---|\n| fj |\n\n---"
    image = _page(setter, source).draw(looks.Look(), margin=8)
    grey = np.asarray(image.convert("L"))
    assert grey.min() < 40
    for edge in (grey[:4], grey[-4:], grey[:, :4], grey[:, -4:]):
        assert (edge == 255).all()


def test_markdown_samples(tmp_path):
    task = jobs.make_task("markdown", folders=FONTS)
    samples = _samples(task, 12)
    assert all(isinstance(sample, Sample) for sample in samples)
    for sample in samples:
        with Image.open(io.BytesIO(sample.image)) as image:
            assert image.size == (sample.width, sample.height) and max(image.size) <= 1536
    tables = [s for s in samples if "table" in s.prompt.lower() or "表" in s.prompt]
    assert tables and all(s.answer.startswith("|") for s in tables)


def test_blocks_that_hide_something_are_left_out(tmp_path):
    kept = ["plain *text*", "<http://a.b>"]
    hidden = ["a [link](http://a.b)", "![image](a.png)", "<b>bold</b>", "<div>\nx\n</div>"]
    text = "\n\n".join([*kept, *hidden])
    (tmp_path / "a.md").write_text(text, encoding="utf-8")
    drops = Drops()
    (document,) = markdown_images.load([str(tmp_path)], drops)
    assert list(document.blocks) == kept
    (counted,) = drops.to_plain().values()
    assert counted["names"] == [f"a.md, block {number}" for number in (2, 3, 4, 5)]


@pytest.mark.skipif(not scripts.has_raqm(), reason=scripts.RAQM_MISSING)
def test_marks_of_right_to_left_lists_stand_on_the_right(setter):
    for source, side in (("- abc", 0), ("- שלום", 1)):
        mark, text = _page(setter, source).texts
        assert (mark[1] > text[1]) == bool(side)
        assert mark[1] + mark[0].width <= 401


def test_own_markdown(tmp_path):
    (tmp_path / "a.md").write_text("# One\n\n$\\bad$ text\n\nplain\n", encoding="utf-8")
    drops = Drops()
    (document,) = markdown_images.load([str(tmp_path)], drops)
    assert document.blocks == ("# One", "$\\bad$ text", "plain")
    task = jobs.make_task("markdown", inputs=[str(tmp_path)], folders=FONTS)
    assert {sample.answer for sample in _samples(task, 12)} == {"# One", "plain"}
    hopeless = markdown_images.MarkdownTask(
        font_index.scan(set("$bad tex\\•0123456789."), FONTS),
        markdown_images.MarkdownConfig(),
        (dataclasses.replace(document, blocks=document.blocks[1:2]),),
    )
    (drop,) = _samples(hopeless, 1)
    assert isinstance(drop, Drop) and drop.reason == "mathtext cannot draw a formula in it"


def test_without_markdown_parser_the_error_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "markdown_it", None)
    markdown_tree._parser.cache_clear()
    try:
        with pytest.raises(ImportError, match="pip install markdown-it-py"):
            markdown_tree.parse("a")
    finally:
        markdown_tree._parser.cache_clear()
