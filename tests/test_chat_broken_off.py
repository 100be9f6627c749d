"""Chats that are broken off, continued twice or asked in between; pictures of every kind."""

import dataclasses
import io
import itertools

import numpy as np
import pytest
from model_helpers import TINY, make_run, replace, weights
from PIL import Image

from bluelm_jax import api, chat_engine, generate
from bluelm_jax.chat import Chat, Conversation
from bluelm_jax.sampling import SamplingConfig

RUN = replace(make_run(), "model", decoder=dataclasses.replace(TINY.decoder, max_length=1024))
SIX = {"max_new_tokens": 6, "min_new_tokens": 6}
NEW = SamplingConfig(**SIX)
PIXELS = np.random.default_rng(0).integers(0, 256, (31, 22, 3), np.uint8)


@pytest.fixture(scope="module")
def model():
    return api.Model(RUN, weights(RUN.model))


@pytest.fixture(scope="module")
def chat(model):
    return model._chat


def break_off(monkeypatch, name, after, owner=generate, *, late=True):
    """Ctrl-C in the given call of a compiled step: behind it, when its cache is used up already."""
    step, calls = getattr(owner, name), itertools.count()

    def broken(*args, **kwargs):
        if next(calls) < after:
            return step(*args, **kwargs)
        if late:
            step(*args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(owner, name, broken)


STEPS = [("_append", chat_engine, 0), ("begin", chat_engine, 0), ("decode", generate, 1)]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("name", "owner", "after"), STEPS)
def test_ctrl_c_leaves_a_text_session_usable(model, monkeypatch, name, owner, after, late):
    session = model.chat()
    first = session.ask("Hi", **SIX)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        break_off(patch, name, after, owner, late=late)
        session.ask("Go", max_new_tokens=12, min_new_tokens=12)
    kept = session._past
    assert session.history[0] == ("Hi", first) and len(session.history) == kept.turns
    assert kept.turns == (2 if name == "decode" else 1)  # What has begun stands as far as it came.
    answer = session.ask("And?", **SIX)
    again = dataclasses.replace(kept, cache=None, cached=0)
    assert "".join(model.ask(again, "And?", **SIX)) == answer


def test_ctrl_c_with_images_goes_on_or_says_so(model, monkeypatch):
    session = model.chat()
    session.ask("Read.", PIXELS, **SIX)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        break_off(patch, "decode", 0, late=False)
        session.ask("Go", max_new_tokens=12)
    assert session.ask("And?", **SIX) and len(session.history) == 3
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        break_off(patch, "decode", 0)
        session.ask("Go", max_new_tokens=12)
    with pytest.raises(ValueError, match="cache was used up; start a new chat"):
        session.ask("And?", **SIX)


def test_an_image_that_was_lost_is_not_said(model, monkeypatch):
    session = model.chat()
    session.ask("Hi", **SIX)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        break_off(patch, "decode", 0)
        session.ask("Read.", PIXELS, max_new_tokens=12)
    assert [question for question, _ in session.history] == ["Hi"]
    assert session.ask("Read.", PIXELS, **SIX)


def test_the_next_question_ends_an_open_answer(model):
    session = model.chat()
    session.ask("Hi", **SIX)
    open_answer = session.stream("one", max_new_tokens=40, min_new_tokens=40)
    text = next(open_answer)
    never_read = session.stream("never", **SIX)
    second = session.ask("two", **SIX)
    assert list(open_answer) == []
    assert session.history[1:] == [("one", text), ("two", second)]
    assert session._past.turns == 3 and session.ask("three", **SIX)
    assert "".join(never_read) == session.history[-1][1]


def test_a_conversation_is_continued_once(chat):
    answer = chat.ask(Conversation(), "Hi", sampling=NEW)
    list(answer)
    past = answer.conversation
    waiting = chat.ask(past, "X", sampling=NEW)
    list(chat.ask(past, "X", sampling=NEW))
    with pytest.raises(ValueError, match="this conversation was continued already"):
        chat.ask(past, "X", sampling=NEW)
    with pytest.raises(ValueError, match="this conversation was continued already"):
        list(waiting)


def test_questions_that_are_no_text_or_have_no_place(model, chat):
    with pytest.raises(TypeError, match="str"):  # Ours, or that of the type checker in tests.
        model.generate(None, None)  # pyright: ignore
    plain = Chat(weights(RUN.model), replace(RUN, "data", template="plain"))
    with pytest.raises(ValueError, match="template 'plain' has no place for the text"):
        plain.ask(Conversation(), "What?", [Image.fromarray(PIXELS)])
    assert list(plain.ask(Conversation(), "<image> ", [Image.fromarray(PIXELS)], sampling=NEW))


def test_stop_tokens_of_any_kind():
    for stop in ([7, 8], (np.int64(7), 8), np.array([7, 8]), iter((7, 8))):
        assert Chat(weights(RUN.model), RUN, stop=stop).stop[1:] == (7, 8)
    assert Chat(weights(RUN.model), RUN, stop=7).stop[1:] == (7,)
    for stop in (-1, RUN.model.decoder.vocab_size):
        with pytest.raises(ValueError, match=f"stop token {stop}: must be in 0..279"):
            Chat(weights(RUN.model), RUN, stop=[stop])
    with pytest.raises(TypeError):
        Chat(weights(RUN.model), RUN, stop=[2.5])  # pyright: ignore


# Pictures --------------------------------------------------------------------------------------------


def saved(kind, path):
    """A file of one kind, and its name."""
    image, options = Image.fromarray(PIXELS), {}
    if kind.startswith("EXIF"):
        options["exif"] = Image.Exif()
        options["exif"][0x0112] = 6
    elif kind == "16-bit":
        image = Image.fromarray(PIXELS[..., 0].astype(np.uint16) * 257)
    elif kind == "float":
        image = Image.fromarray(PIXELS[..., 0].astype(np.float32) / 255)
    elif kind == "RGBA":
        image = Image.fromarray(np.dstack([PIXELS, PIXELS[..., :1]]))
    else:
        image = image.convert(kind)
    image.save(path, **options)
    return path


@pytest.mark.parametrize(
    ("kind", "extension"),
    [
        ("EXIF 6", "jpg"), ("EXIF 6", "png"), ("EXIF 6", "tif"), ("CMYK", "jpg"), ("RGBA", "png"),
        ("16-bit", "png"), ("LA", "png"), ("float", "tif"), ("P", "gif"), ("1", "png"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("loaded", [False, True])
def test_a_path_and_its_picture_give_the_same_tiles(chat, tmp_path, kind, extension, loaded):
    path = saved(kind, tmp_path / f"a.{extension}")
    with Image.open(path) as picture:
        if loaded:
            picture.load()
        got = chat.make_turn(Conversation(), "R", [picture])
    want = chat.make_turn(Conversation(), "R", [path])
    np.testing.assert_array_equal(got.tiles, want.tiles)
    assert got.tokens.tolist() == want.tokens.tolist()


@pytest.mark.parametrize("mode", ["F", "I", "YCbCr", "HSV", "PA", "La", "RGBX", "RGBa", "I;16"])
def test_pictures_of_other_modes(chat, mode):
    assert chat.make_turn(Conversation(), "R", [Image.new(mode, (22, 31))]).num_views == 1


def test_pictures_that_cannot_be_used_are_named(model):
    with pytest.raises(ValueError, match="Pillow image of mode RGB: shorter side 1"):
        model.generate(np.zeros((1, 5, 3), np.uint8), "R")
    half = io.BytesIO()
    Image.fromarray(PIXELS).save(half, "PNG")
    picture = Image.open(io.BytesIO(half.getvalue()[:500]))
    with pytest.raises(ValueError, match=r"Pillow image of mode RGB, \(22, 31\): .*truncated"):
        model.generate(picture, "R")
