"""Tests of rendered PDF pages, on files that Matplotlib writes."""

import io
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from PIL import Image

from bluelm_jax.data.rendering import jobs, pdf_pages, shards
from bluelm_jax.data.rendering.sampling import Drop, Drops, Sample

pytest.importorskip("pypdfium2", reason=pdf_pages.MISSING)

LINES = [f"Line {word} of the page." for word in ("one", "two", "three", "four", "five", "six")]


def write_pdf(path, pages):
    """Each page a list of lines; an empty one has a grey box and no text."""
    with matplotlib.rc_context({"pdf.fonttype": 42}), PdfPages(path) as pdf:
        for lines in pages:
            figure = Figure(figsize=(4, 5))
            for number, line in enumerate(lines):
                figure.text(0.1, 0.9 - 0.12 * number, line, fontsize=14)
            if not lines:
                figure.patches.append(
                    matplotlib.patches.Rectangle((0.2, 0.2), 0.5, 0.5, color="0.5")
                )
            pdf.savefig(figure)
    return path


def _samples(task, count):
    return [task.sample(shards.sample_rng(0, "pdf", i), i) for i in range(count)]


def test_whole_pages(tmp_path):
    write_pdf(tmp_path / "a.pdf", [LINES, LINES[::-1]])
    pages = pdf_pages.find_pages([str(tmp_path)], Drops())
    cfg = pdf_pages.PdfConfig(band_fraction=0.0, noise=0.0, dpi=(100.0, 100.0))
    samples = _samples(pdf_pages.PdfTask(pages, cfg, seed=0), 2)
    assert {sample.answer for sample in samples} == {"\n".join(LINES), "\n".join(LINES[::-1])}
    for sample in samples:
        assert (sample.width, sample.height) == (400, 500) and sample.meta["part"] == "page"
        with Image.open(io.BytesIO(sample.image)) as image:
            assert np.asarray(image.convert("L")).min() < 64
    assert [sample.meta["source"] for sample in samples] in (
        ["a.pdf, page 1", "a.pdf, page 2"],
        ["a.pdf, page 2", "a.pdf, page 1"],
    )


def test_bands_hold_the_lines_they_show(tmp_path):
    write_pdf(tmp_path / "a.pdf", [LINES])
    pages = pdf_pages.find_pages([str(tmp_path)], Drops())
    cfg = pdf_pages.PdfConfig(band_fraction=1.0, noise=0.0, dpi=(100.0, 100.0))
    samples = _samples(pdf_pages.PdfTask(pages, cfg, seed=0), 30)
    found = set()
    for sample in samples:
        lines = sample.answer.split("\n")
        start = LINES.index(lines[0])
        assert lines == LINES[start : start + len(lines)]
        with Image.open(io.BytesIO(sample.image)) as image:
            ink = (np.asarray(image.convert("L")) < 128).any(axis=1).astype(int)
        assert not ink[0] and not ink[-1]
        # Rows of ink come in as many groups as there are lines; dots of i add none.
        assert (np.diff(ink) == 1).sum() >= len(lines)
        assert sample.height <= 500 * (len(lines) + 2) / 6
        found.add(len(lines))
    assert len(found) > 3


def test_large_pages_are_drawn_at_a_lower_resolution(tmp_path):
    write_pdf(tmp_path / "a.pdf", [LINES])
    task = jobs.make_task("pdf", inputs=[str(tmp_path)], sizes=(300, 300), max_side=256)
    for sample in _samples(task, 4):
        assert max(sample.width, sample.height) <= 256 and sample.meta["dpi"] <= 70


def test_what_cannot_be_used_is_named(tmp_path):
    good = write_pdf(tmp_path / "good.pdf", [LINES, [], ["x" * 90] * 6]).read_bytes()
    (tmp_path / "cut.pdf").write_bytes(good[:300])
    (tmp_path / "empty.pdf").write_bytes(b"")
    password = b"/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <%s> /U <%s> >> /ID [<00><00>]" % (
        b"01" * 32, b"02" * 32,
    )  # fmt: skip
    at = good.rindex(b"trailer\n<<") + len(b"trailer\n<<")
    (tmp_path / "locked.pdf").write_bytes(good[:at] + b" " + password + good[at:])
    drops = Drops()
    pages = pdf_pages.find_pages([str(tmp_path)], drops)
    assert [number for _, number in pages] == [0, 1, 2]
    counted = drops.to_plain()
    assert [name.split(":")[0] for name in counted["damaged PDF"]["names"]] == [
        "cut.pdf", "empty.pdf",
    ]  # fmt: skip
    assert counted["PDF that needs a password"]["names"][0].startswith("locked.pdf")
    cfg = pdf_pages.PdfConfig(max_chars=300, band_fraction=0.0)
    task = pdf_pages.PdfTask(pages, cfg, seed=0)
    reasons = {s.reason if isinstance(s, Drop) else "drawn" for s in _samples(task, 3)}
    assert "no text layer, or hardly any text" in reasons and "drawn" in reasons
    (tmp_path / "good.pdf").unlink()
    with pytest.raises(ValueError, match="no readable page"):
        pdf_pages.find_pages([str(tmp_path)], Drops())


def test_pages_come_once_each_before_any_again(tmp_path):
    write_pdf(tmp_path / "a.pdf", [[f"This is page number {n} of it."] for n in range(5)])
    task = jobs.make_task("pdf", inputs=[str(tmp_path)])
    assert jobs.default_count(task) == 5
    sources = [sample.meta["source"] for sample in _samples(task, 10)]
    assert len(set(sources[:5])) == 5 and sources[:5] == sources[5:]
    assert all(isinstance(sample, Sample) for sample in _samples(task, 5))


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ("Donau\ufffe\r\ndampf\r\n", "Donaudampf"),
        ("neu zu star\ufffe", "neu zu star-"),
        ("a  b\r\n\r\n \r\nc", "a b\nc"),
        ("well-\r\nknown", "well-\nknown"),
    ],
)
def test_clean_text(raw, text):
    assert pdf_pages.clean_text(raw) == text


def test_needs_input_and_pypdfium2(monkeypatch):
    with pytest.raises(ValueError, match="--input"):
        jobs.make_task("pdf")
    monkeypatch.setitem(sys.modules, "pypdfium2", None)
    pdf_pages._pdfium.cache_clear()
    try:
        with pytest.raises(ImportError, match="pip install pypdfium2"):
            pdf_pages.find_pages(["anything"], Drops())
    finally:
        pdf_pages._pdfium.cache_clear()
