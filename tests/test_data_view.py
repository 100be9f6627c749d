"""What inspect_data shows of a batch: tokens, samples and tiles, in the terminal and as a page."""

import re

import numpy as np
import pytest
from data_helpers import SIDE, TILING, make_config, record, write_image, write_json
from rich.cells import cell_len

from bluelm_jax import schemes
from bluelm_jax.data.tokenizer import ByteTokenizer
from bluelm_jax.data_config import Packing, SourceConfig
from experiments import data_page, data_terminal, data_view
from experiments.token_texts import Token, TokenTexts, printable


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    name = write_image(folder, "a.png", 56, 28)
    records = [
        record("a", "<image>\nWhat <b>?", "A </s> tag", image=name),
        record("b", "Q", "Yes é"),
    ]
    return write_json(folder / "a.json", records)


FIELDS = {"shuffle": False, "batch_size": 1, "packing": Packing(fit="first"), "tiles_per_group": 6,
          "epochs": 1, "drop_remainder": False}  # fmt: skip


def view_of(path, number=0, **fields):
    viewer = data_view.Viewer(make_config(path, **(FIELDS | fields)), side=SIDE)
    (view,) = viewer.views(number, 1)
    return view


def text_of(piece):
    return piece.note or "".join(token.text for token in piece.tokens)


def terminal(view, color=False, width=200):
    return data_terminal.render(view, color=color, width=width)


def test_samples_pieces_and_pictures(path):
    (row,) = view_of(path, seq_len=120).rows
    first, second = row.samples
    assert re.fullmatch(r"sample 'a' of .*a\.json\[0\] \(byte \d+\)", first.name)
    assert [(p.kind, text_of(p)) for p in first.pieces] == [
        ("text", "<s>[|Human|]:"),
        ("image", "image: 12 tokens, tiles 0-2"),
        ("text", "\nWhat <b>?[|AI|]:"),
        ("target", "A </s> tag</s>"),
    ]
    assert [(p.kind, text_of(p)) for p in second.pieces] == [
        ("text", "<s>[|Human|]:Q[|AI|]:"),
        ("target", "Yes é</s>"),
    ]
    places = [(p.start, p.stop) for s in row.samples for p in s.pieces]
    assert [stop for _, stop in places[:-1]] == [start for start, _ in places[1:]]
    assert (places[0][0], places[-1][1], row.length) == (0, row.used, 120)
    assert (first.supervised, second.supervised) == (
        len("A </s> tag") + 1,
        len("Yes é".encode()) + 1,
    )
    (picture,) = first.pictures
    assert (picture.width, picture.height, picture.cols, picture.rows) == (56, 28, 2, 1)
    assert (picture.tiles, picture.thumbnail) == ((1, 2), 0)


def test_special_tokens_differ_from_the_same_text(path):
    (row,) = view_of(path, seq_len=120).rows
    tokens = row.samples[0].pieces[-1].tokens
    assert tokens[-1] == Token("</s>", (2,), row.samples[0].stop - 1, special=True)
    assert "".join(t.text for t in tokens[:-1]) == "A </s> tag"
    assert not any(t.special for t in tokens[:-1])


def test_tokens_of_one_character_stay_together():
    tokenizer = ByteTokenizer()
    ids = [1, *tokenizer.encode("é猫👩x"), 4 + 0xC3, *tokenizer.encode("y"), 2]
    tokens = TokenTexts(tokenizer).split(ids, 10)
    assert [t.text for t in tokens] == ["<s>", "é", "猫", "👩", "x", "\ufffd", "y", "</s>"]
    assert [t.at for t in tokens] == [10, 11, 13, 16, 20, 21, 22, 23]
    assert [len(t.ids) for t in tokens] == [1, 2, 3, 4, 1, 1, 1, 1]
    assert [i for t in tokens for i in t.ids] == ids
    assert [t.special for t in tokens] == [True, *[False] * 6, True]


def test_spaces_that_stand_in_tokens_stay():
    """A tokenizer with U+2581 drops the space of a first token when it decodes."""

    class Pieces(ByteTokenizer):
        def encode(self, text):
            return [7] if text == "a" else [8]

        def decode(self, ids):
            return "".join({7: "\u2581a", 8: "\u2581b"}[i] for i in ids).replace("\u2581", " ")[1:]

    tokens = TokenTexts(Pieces()).split([8, 7], 0)
    assert [t.text for t in tokens] == [" b", " a"]


def test_newlines_of_the_layout_and_several_images(tmp_path):
    names = [write_image(tmp_path, f"{i}.png", 28, 56, seed=i) for i in range(2)]
    sample = record("a", "<image> and <image>", "A", image=names)
    path = write_json(tmp_path / "a.json", [sample])
    view = view_of(path, layout=schemes.UnpadNewline(), packing=None)
    kinds = [p.kind for p in view.rows[0].samples[0].pieces]
    assert kinds.count("newline") >= 4 and "[newline]" in terminal(view)
    one, two = view.rows[0].samples[0].pictures
    assert (one.rows, two.rows) == (2, 2)
    assert (one.thumbnail, *one.tiles, two.thumbnail, *two.tiles) == tuple(range(6))
    assert view.tiles_used == (6,)


def test_rows_that_share_tiles_and_a_source_with_its_own_tiling(tmp_path):
    """Tile numbers count on through the rows of a group; each source is cut by its own rule."""
    name = write_image(tmp_path, "a.png", 56, 56)
    path = str(write_json(tmp_path / "a.json", [record("a", "<image>", "A", image=name)] * 2))
    fixed = schemes.Tiling(scheme=schemes.Fixed(), tile_size=TILING.tile_size)
    sources = (SourceConfig(path=path), SourceConfig(path=path, tiling=fixed))
    view = view_of(sources, batch_size=4, packing=None, tiles_per_group=20, tile_groups=1)
    used = []
    for row in view.rows:
        (picture,) = row.samples[0].pictures
        used += [*([picture.thumbnail] if picture.thumbnail is not None else []), *picture.tiles]
    assert sorted(used) == list(range(view.tiles_used[0]))
    assert {row.samples[0].num_views for row in view.rows} == {1, 5}
    filled = view.tiles[0].any(axis=(1, 2, 3))
    assert filled[: view.tiles_used[0]].all() and not filled[view.tiles_used[0] :].any()


def test_terminal_marks_and_colours(path):
    view = view_of(path, seq_len=120)
    plain, colored = terminal(view), terminal(view, color=True)
    assert "\x1b" not in plain
    assert "«A </s> tag⟨</s>⟩»" in plain and "[image: 12 tokens, tiles 0-2]" in plain
    assert "a.png: 56x28, grid 2:1, 3 tiles with the thumbnail" in plain
    assert "Yes é" in "".join(re.findall(r"\x1b\[30;42m(.*?)\x1b\[0m", colored))
    stripped = re.sub(r"\x1b\[[\d;]*m", "", colored)
    assert "A </s> tag</s>" in stripped and "«" not in stripped
    assert re.search(r"\x1b\[7;30;42m</s>", colored), colored


def test_without_a_width_lines_stay_whole(tmp_path):
    path = write_json(tmp_path / "a.json", [record("a", "Q", "word " * 60)])
    view = view_of(path, seq_len=400)
    text = data_terminal.render(view, color=False, width=None)
    (line,) = (each for each in text.splitlines() if "word" in each)
    assert line.count("word") == 60


def test_terminal_keeps_to_its_width(tmp_path):
    long = record("a", "猫" * 50 + " word" * 30, "b" * 90)
    view = view_of(write_json(tmp_path / "a.json", [long]), seq_len=600)
    lines = terminal(view, width=60).splitlines()
    assert max(map(cell_len, lines)) <= 60 and len(lines) > 6
    assert "".join(lines).count("猫") == 50


def test_hostile_text_acts_on_no_display(tmp_path):
    text = "\x1b[31mred\x07 \u202eevil \x00 <script>"
    view = view_of(write_json(tmp_path / "a.json", [record("a", text, "A")]), seq_len=200)
    shown = r"\x1b[31mred\x07 \u202eevil \x00 "
    assert shown + "<script>" in terminal(view)
    page = data_page.render(view, "t", {})
    assert "<script>" not in page and "\x1b" not in page and "\u202e" not in page
    assert printable("a\u200db\n") == "a\u200db\n"


def test_right_to_left_text_is_isolated(tmp_path):
    view = view_of(write_json(tmp_path / "a.json", [record("a", "Q", "قطة")]), seq_len=100)
    assert "«\u2068قطة⟨</s>⟩\u2069»" in terminal(view)
    assert data_page.render(view, "t", {}).count("<bdi ") == 2


def test_page_escapes_text_and_shows_the_tiles(path):
    view = view_of(path, seq_len=120)
    page = data_page.render(view, "a <title>", {"Note": "<i>"})
    assert "<h1>a &lt;title&gt;</h1>" in page and "Note: &lt;i&gt;" in page and "<b>?" not in page
    assert page.count("data:image/png;base64,") == 3 and "group 0: 3 of 6 tiles" in page
    assert 'class="special" title="id 2, position ' in page
    assert 'title="ids 199, 173, positions ' in page  # The two bytes of é.
    assert page.count('<section class="sample">') == 2 and "padding</span>" in page
    assert "prefers-color-scheme: dark" in page and "↵\n" in page


def test_samples_that_would_stop_a_run_are_named(path, tmp_path):
    name = write_image(tmp_path, "a.png", 28, 28)
    bad = {"id": "no turns", "conversations": []}
    good = record("good", "<image>", "A", image=name)
    gone = record("gone", "<image>", "A", image="none.png")
    path = write_json(tmp_path / "b.json", [bad, gone, good])
    view = view_of(path, on_unreadable_image="skip")
    assert [(e.reason, e.stops) for e in view.left_out] == [
        ("invalid_record", True),
        ("unreadable_image", False),
    ]
    shown = terminal(view)
    assert "a run would stop here: invalid_record: sample 'no turns'" in shown
    assert "left out: unreadable_image: sample 'gone'" in shown
    assert "1. sample 'good'" in shown
    with pytest.raises(ValueError, match=r"--skip=9: .*\n  invalid_record: sample 'no turns'"):
        view_of(path, 9)


def test_images_taken_away_by_policy_have_no_pictures(tmp_path):
    path = write_json(tmp_path / "a.json", [record("a", "<image>see", "A", image="none.png")])
    (row,) = view_of(path, on_unreadable_image="replace_with_text_only").rows
    assert row.samples[0].pictures == () and text_of(row.samples[0].pieces[0]).endswith(
        "see[|AI|]:"
    )


def test_several_batches_in_order(path):
    viewer = data_view.Viewer(make_config(path, **(FIELDS | {"packing": None})), side=SIDE)
    views = list(viewer.views(0, 5))
    assert [v.number for v in views] == [0, 1]
    assert [v.rows[0].samples[0].name[:10] for v in views] == ["sample 'a'", "sample 'b'"]
    assert viewer.counters.startswith("batches 2, positions ")


@pytest.mark.parametrize(
    ("choice", "environment", "tty", "expected"),
    [
        ("auto", {}, True, True),
        ("auto", {}, False, False),
        ("auto", {"NO_COLOR": "1"}, True, False),
        ("auto", {"TERM": "dumb"}, True, False),
        ("always", {"NO_COLOR": "1"}, False, True),
        ("never", {}, True, False),
    ],
)
def test_when_there_are_colours(choice, environment, tty, expected, monkeypatch):
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout.isatty", lambda: tty)
    assert data_terminal.use_color(choice) is expected


def test_large_tiles_are_shown_smaller():
    tiles = np.zeros((1, 1, 384, 384, 3), np.uint8)
    assert data_page._uri(tiles[0, 0]).startswith("data:image/jpeg;base64,")
    assert data_page._uri(tiles[0, 0, :28, :28]).startswith("data:image/png;base64,")
