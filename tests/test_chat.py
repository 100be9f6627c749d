"""A chat over one cache: the tokens of training, equal to reading all again, few compilations."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_helpers import TINY, Q, make_run, replace, weights
from PIL import Image

from bluelm_jax import chat, chat_engine, generate
from bluelm_jax.chat import Chat, Conversation
from bluelm_jax.data.tokenizer import ByteTokenizer
from bluelm_jax.sampling import SamplingConfig

RUN = replace(make_run(), "model", decoder=dataclasses.replace(TINY.decoder, max_length=1024))
NEW = SamplingConfig(max_new_tokens=6)
TOKENS = ByteTokenizer()
NEVER = 279


@pytest.fixture(scope="module")
def model():
    """The tiny model; byte 'z' is a further stop token, so that answers end in both ways."""
    return Chat(weights(RUN.model), RUN, stop=(TOKENS.encode("z")[0],))


def picture(seed, size=(31, 22)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8))


def say(model, past, question, images=(), **sampling):
    """The answer, complete, and the conversation after it."""
    answer = model.ask(past, question, images, sampling=dataclasses.replace(NEW, **sampling))
    assert "".join(answer) == answer.text == TOKENS.decode(answer.new_tokens)
    return answer, answer.conversation


def again(model, asked, turns, **sampling):
    """Answer to the same tokens by one `generate` call on an empty cache, images encoded together.

    Args:
      asked: tokens of the whole conversation up to the last marker.
      turns: (first position, example) of the turns with images.
    """
    index = np.full(len(asked), -1, np.int32)
    tiles, views = [np.zeros((0, 20, 20, 3), np.uint8)], 0
    for start, turn in turns:
        part = np.where(turn.image_index >= 0, turn.image_index + views * Q, turn.image_index)
        index[start : start + turn.length] = part
        tiles.append(turn.tiles)
        views += turn.num_views
    prompts = generate.Prompts(
        tokens=jnp.asarray(asked)[None],
        lengths=jnp.array([len(asked)]),
        image_index=jnp.asarray(index)[None],
        tiles=jnp.asarray(np.concatenate(tiles))[None],
    )
    out = generate.generate(
        weights(RUN.model), prompts, jax.random.key(0), cfg=RUN.model,
        sampling=dataclasses.replace(NEW, **sampling), stop=model.stop,
    )  # fmt: skip
    return np.asarray(out.tokens)[0, : int(out.lengths[0])].tolist()


def text_ids(*parts):
    """Ids of template and content text; integers are special tokens."""
    return [i for part in parts for i in ([part] if isinstance(part, int) else TOKENS.encode(part))]


def test_tokens_of_a_text_chat_are_those_of_the_template(model):
    _, first = say(model, Conversation(), "Hi")
    opening = text_ids(TOKENS.bos_id, "[|Human|]:Hi[|AI|]:")
    assert first.tokens[: len(opening)].tolist() == opening
    one = first.tokens[len(opening) :].tolist()
    second, after = say(model, first, "And?")
    turn = text_ids(TOKENS.eos_id, "[|Human|]:And?[|AI|]:")
    assert after.tokens.tolist() == [*opening, *one, *turn, *second.new_tokens]


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_later_turns_equal_reading_everything_again(model, penalty):
    """Text, one image, then two images and text behind a long history: three turns, one cache."""
    past, turns = Conversation(), []
    questions = [
        ("x" * 150, []),  # More than a chunk of 128.
        ("What?", [picture(1)]),
        ("Before <image> and after", [picture(2), picture(3)]),
        ("And now?", []),
    ]
    for question, images in questions:
        turn = model.make_turn(past, question, images)
        start = len(past.tokens)
        turns += [(start, turn)] if images else []
        asked = np.concatenate([past.tokens, turn.tokens])
        cached = past.cached
        answer, past = say(model, past, question, images, repetition_penalty=penalty)
        assert answer.new_tokens == again(model, asked, turns, repetition_penalty=penalty)
        assert cached >= start - 1, "an earlier turn would be read again"
    assert past.turns == 4 and (~past.is_text).sum() == 3 * Q


def test_image_turns_are_those_of_the_planner(model):
    turn = model.make_turn(Conversation(), "Read.", [picture(1), picture(2)])
    assert turn.num_views == 2 and (turn.image_index >= 0).sum() == 2 * Q
    marks = text_ids(TOKENS.bos_id, "[|Human|]:")
    assert turn.image_index[len(marks) : len(marks) + Q].tolist() == list(range(Q))
    assert turn.tokens[len(marks) + Q] == TOKENS.encode("\n")[0]


def test_a_file_and_a_picture_are_the_same_image(model, tmp_path):
    picture(5).save(tmp_path / "a.png")
    one = model.make_turn(Conversation(), "Read.", [tmp_path / "a.png"])
    two = model.make_turn(Conversation(), "Read.", [picture(5)])
    np.testing.assert_array_equal(one.tiles, two.tiles)
    assert one.tokens.tolist() == two.tokens.tolist()


def test_answer_templates_with_text_around(tmp_path):
    """Vicuna writes a space before an answer: the model gives it, so a turn does not repeat it."""
    run = replace(RUN, "data", template="vicuna")
    model = Chat(weights(run.model), run)
    past = dataclasses.replace(Conversation(), turns=1)
    turn = model.make_turn(past, "More")
    assert turn.tokens.tolist() == text_ids(TOKENS.eos_id, "USER: More ASSISTANT:")


def test_an_answer_left_early_can_be_continued(model):
    answer = model.ask(Conversation(), "Go on", sampling=SamplingConfig(max_new_tokens=40), count=2)
    for _ in answer:
        break
    past = answer.conversation
    assert 0 < len(answer.new_tokens) < 40 and past.turns == 1
    turn = model.make_turn(past, "Again")
    asked = np.concatenate([past.tokens, turn.tokens])
    assert say(model, past, "Again")[0].new_tokens == again(model, asked, [])


def test_turns_compile_nothing_new(model):
    """After one turn with a tile and one without, others of any length below the bucket reuse all."""
    _, past = say(model, Conversation(), "x", [picture(1)])
    _, past = say(model, past, "y")
    sizes = [f._cache_size() for f in (chat_engine._append, chat_engine.begin, generate.decode)]
    for question, images in (("longer question", []), ("z" * 40, [picture(2, (40, 20))])):
        _, past = say(model, past, question, images)
    after = [f._cache_size() for f in (chat_engine._append, chat_engine.begin, generate.decode)]
    assert after == sizes and past.cache.size == 256


def test_cache_grows_by_buckets(model):
    assert [chat_engine.cache_size(n) for n in (1, 256, 257, 513)] == [256, 256, 512, 1024]
    _, past = say(model, Conversation(), "a" * 200)
    assert past.cache.size == 256
    turn = model.make_turn(past, "b" * 100)
    asked = np.concatenate([past.tokens, turn.tokens])
    answer, past = say(model, past, "b" * 100)
    assert past.cache.size == 512 and answer.new_tokens == again(model, asked, [])


@pytest.mark.parametrize(("count", "padded"), [(0, 1), (1, 1), (2, 2), (3, 4), (5, 8)])
def test_encoded_tiles_in_batches_equal_all_at_once(count, padded):
    tiles = np.random.default_rng(0).integers(0, 256, (count, 20, 20, 3), np.uint8)
    got = chat_engine.encode(weights(RUN.model), tiles, RUN.model)
    assert got.shape == (1, 1 if count == 0 else padded * Q, 32)
    if count:
        want = generate.vlm.encode_tiles(weights(RUN.model), jnp.asarray(tiles), RUN.model)
        np.testing.assert_allclose(got[0, : count * Q], want.reshape(-1, 32), atol=1e-5)


def test_seeds(model):
    def sampled(seed):
        how = SamplingConfig(max_new_tokens=8, temperature=1.5)
        return list(model.ask(Conversation(), "Hi", sampling=how, seed=seed))

    assert sampled(1) == sampled(1) != sampled(2)


# Mistakes --------------------------------------------------------------------------------------------


def test_too_long_names_the_numbers_and_leaves_the_chat_usable(model):
    _, past = say(model, Conversation(), "Hi")
    with pytest.raises(chat.PromptTooLongError) as caught:
        model.ask(past, "x" * 1100, [picture(1)], sampling=NEW)
    found = str(caught.value)
    assert "positions (9 of images); max_length = 1024 leaves 1018 before 6 new tokens" in found
    assert say(model, past, "Still there?")[1].turns == 2


def test_a_language_model_alone_answers_text_and_refuses_images():
    model = Chat({"decoder": weights(RUN.model)["decoder"]}, RUN)
    assert not model.sees_images
    with pytest.raises(ValueError, match=r"1 image.* no vision tower"):
        model.ask(Conversation(), "What?", [picture(0)], sampling=NEW)
    assert len(say(model, Conversation(), "Hi")[1].tokens) > 20


def test_bad_images_are_named(model, tmp_path):
    (tmp_path / "text.png").write_text("no image")
    for name, reason in (("none.png", "cannot be opened"), ("text.png", "not an image")):
        with pytest.raises(ValueError, match=f"{name}.*{reason}"):
            model.ask(Conversation(), "Read.", [tmp_path / name], sampling=NEW)


def test_more_marks_than_images(model):
    with pytest.raises(ValueError, match="1 <image> in the turns, 0 images"):
        model.ask(Conversation(), "What is <image>?", sampling=NEW)


def test_conversation_of_an_answer_that_has_not_begun(model):
    answer = model.ask(Conversation(), "Hi", sampling=NEW)
    with pytest.raises(ValueError, match="has not begun"):
        _ = answer.conversation
