"""How records are read, and which text stands around their turns."""

import pytest
from data_helpers import record, turn

from bluelm_jax.data import conversation
from bluelm_jax.data.conversation import (
    TEMPLATES,
    Template,
    check_tokens,
    read_turns,
    render,
    render_prompt,
)
from bluelm_jax.data.sources import InvalidRecordError
from bluelm_jax.data.tokenizer import ByteTokenizer

EXTRA = sorted({token for t in TEMPLATES.values() for token in t.special_tokens})


def text_of(segments, supervised=None):
    chosen = [s for s in segments if supervised is None or s.supervised is supervised]
    return "".join(f"<{s.kind}>" if not s.text else s.text for s in chosen)


def rendered(name, *texts, system=""):
    turns, _ = read_turns(record("a", *texts), "a")
    return render(turns, conversation.get_template(name), system=system)


# The whole conversation, and what of it is supervised.
EXPECTED = {
    "bluelm": ("<bos>[|Human|]:Q1[|AI|]:A1<eos>[|Human|]:Q2[|AI|]:A2<eos>", "A1<eos>A2<eos>"),
    "minicpm": ("<bos><用户>Q1<AI>A1<eos><用户>Q2<AI>A2<eos>", "A1<eos>A2<eos>"),
    "plain": ("<bos>A1<eos>A2<eos>", "A1<eos>A2<eos>"),
    "vicuna": ("<bos>USER: Q1 ASSISTANT: A1<eos>USER: Q2 ASSISTANT: A2<eos>", " A1<eos> A2<eos>"),
    "chatml": (
        "<|im_start|>user\nQ1<|im_end|>\n<|im_start|>assistant\nA1<|im_end|>\n"
        "<|im_start|>user\nQ2<|im_end|>\n<|im_start|>assistant\nA2<|im_end|>\n",
        "A1<|im_end|>A2<|im_end|>",
    ),
    "llama3": (
        "<|begin_of_text|>"
        "<|start_header_id|>user<|end_header_id|>\n\nQ1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA1<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nQ2<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA2<|eot_id|>",
        "A1<|eot_id|>A2<|eot_id|>",
    ),
}


def test_every_template_is_expected():
    assert set(EXPECTED) == set(TEMPLATES)


@pytest.mark.parametrize("name", EXPECTED)
def test_text_and_supervision(name):
    segments = rendered(name, "Q1", "A1", "Q2", "A2")
    assert (text_of(segments), text_of(segments, supervised=True)) == EXPECTED[name]


@pytest.mark.parametrize("name", EXPECTED)
def test_prompt_is_a_prefix_of_training_text(name):
    turns, _ = read_turns(record("a", "Q1", "A1", "Q2", "A2"), "a")
    template = conversation.get_template(name)
    whole = text_of(render(turns, template))
    for index, answer in ((0, "A1"), (-1, "A2")):
        prompt, reference = render_prompt(turns, template, turn=index)
        assert reference == answer
        assert not any(segment.supervised for segment in prompt)
        start = text_of(prompt) + template.answer.format(text=answer)
        assert whole.startswith(start)


def test_system_message_from_record_wins_over_config():
    turns = [turn("system", "S"), turn("human", "Q"), turn("gpt", "A")]
    read, _ = read_turns({"conversations": turns}, "a")
    segments = render(read, conversation.get_template("chatml"), system="other")
    assert text_of(segments).startswith("<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nQ")
    assert text_of(segments, supervised=True) == "A<|im_end|>"
    assert text_of(rendered("vicuna", "Q", "A", system="S")).startswith("<bos>S USER: Q")


def test_system_message_without_a_place_is_an_error():
    with pytest.raises(InvalidRecordError, match="'bluelm' has no place for system text"):
        rendered("bluelm", "Q", "A", system="S")


def test_images_keep_their_places():
    segments = rendered("bluelm", "<image>\na <image> b<image>", "A")
    assert text_of(segments) == "<bos>[|Human|]:<image>\na <image> b<image>[|AI|]:A<eos>"
    assert [s.kind for s in segments].count("image") == 3


def test_plain_keeps_the_images_of_human_turns():
    assert text_of(rendered("plain", "Describe <image> now", "A")) == "<bos><image>A<eos>"


def test_image_in_an_answer_is_not_supervised():
    segments = rendered("bluelm", "Q", "see <image> there")
    assert text_of(segments, supervised=True) == "see  there<eos>"
    assert text_of(segments).endswith("see <image> there<eos>")


def test_leading_assistant_turns_are_left_out():
    turns = [turn("gpt", "x"), turn("gpt", "y"), turn("human", "Q"), turn("gpt", "A")]
    read, left_out = read_turns({"conversations": turns}, "a")
    assert left_out == 2
    assert [t.text for t in read] == ["Q", "A"]


def test_empty_answer_is_context_only():
    segments = rendered("bluelm", "Q1", "  ", "Q2", "A2")
    assert text_of(segments) == "<bos>[|Human|]:Q1[|AI|]:<eos>[|Human|]:Q2[|AI|]:A2<eos>"
    assert text_of(segments, supervised=True) == "A2<eos>"


def test_turns_in_a_row_keep_their_markers_and_white_space_goes():
    turns = [turn("human", " Q1\n"), turn("human", "Q2"), turn("gpt", "\nA")]
    read, _ = read_turns({"conversations": turns}, "a")
    segments = render(read, conversation.get_template("bluelm"))
    assert text_of(segments) == "<bos>[|Human|]:Q1[|Human|]:Q2[|AI|]:A<eos>"


def test_stray_keys_are_ignored():
    sample = {"model": "x", "id": 3, "conversations": [turn("human", "Q") | {"extra": 1}]}
    read, _ = read_turns(sample, "a")
    assert [t.text for t in read] == ["Q"]


@pytest.mark.parametrize(
    ("conversations", "message"),
    [
        (None, "must be a list of turns"),
        ([], "must be a list of turns"),
        ([turn("narrator", "x")], "turn 0 must have 'from'"),
        ([turn("human", "x"), turn("gpt", None)], "turn 1 must have 'from'"),
        (["text"], "turn 0 must have 'from'"),
        ([turn(["human"], "x")], "turn 0 must have 'from'"),
        ([turn("gpt", "x")], "no human turn among 1"),
        ([turn("human", "x"), turn("system", "y")], "system message is not the first"),
    ],
)
def test_invalid_records_are_named(conversations, message):
    with pytest.raises(InvalidRecordError, match=f"sample 7.*{message}"):
        read_turns({"conversations": conversations}, "sample 7")


def test_prompt_without_any_answer():
    turns, _ = read_turns(record("a", "Q"), "a")
    prompt, reference = render_prompt(turns, conversation.get_template("bluelm"))
    assert (text_of(prompt), reference) == ("<bos>[|Human|]:Q[|AI|]:", "")


def test_missing_tokens_are_named():
    with pytest.raises(ValueError, match=r"'chatml' needs the token '<\|im_start\|>'"):
        check_tokens(TEMPLATES["chatml"], ByteTokenizer())
    with pytest.raises(ValueError, match="image layout needs the token '<slice>'"):
        check_tokens(TEMPLATES["bluelm"], ByteTokenizer(), ["<slice>"])
    for template in TEMPLATES.values():
        check_tokens(template, ByteTokenizer(EXTRA))


def test_missing_roles_and_long_ends_are_named():
    tokenizer = ByteTokenizer()
    tokenizer.bos_id = None
    with pytest.raises(ValueError, match="'bluelm' needs a bos token"):
        check_tokens(TEMPLATES["bluelm"], tokenizer)
    odd = Template(name="odd", user="{text}", assistant="", end_of_turn="STOP")
    with pytest.raises(ValueError, match="'odd' ends a turn with 'STOP'"):
        check_tokens(odd, ByteTokenizer())


def test_end_of_turn_id():
    tokenizer = ByteTokenizer(EXTRA)
    assert conversation.end_of_turn_id(TEMPLATES["bluelm"], tokenizer) == tokenizer.eos_id
    expected = tokenizer.token_id("<|eot_id|>")
    assert conversation.end_of_turn_id(TEMPLATES["llama3"], tokenizer) == expected


def test_unknown_template_lists_the_known():
    with pytest.raises(ValueError, match="'blue' is unknown; known: bluelm, chatml"):
        conversation.get_template("blue")


def test_images_without_a_mark_come_first_on_lines_of_their_own():
    assert conversation.mark_images("Read.", 2) == "<image>\n<image>\nRead."
    assert conversation.mark_images("Read <image>, then this.", 2) == (
        "<image>\nRead <image>, then this."
    )
    assert conversation.mark_images("Read.", 0) == "Read."
