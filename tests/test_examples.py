"""Token ids, supervision, image positions and the policies for samples that do not fit."""

import dataclasses

import numpy as np
import pytest
from data_helpers import (
    SIDE,
    TILING,
    make_config,
    make_pipeline,
    one_example,
    record,
    turn,
    write_image,
    write_json,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from bluelm_jax import layout, patching, schemes
from bluelm_jax.data import batching, images
from bluelm_jax.data.examples import Example, OverlongError, Skipped, TooManyTilesError
from bluelm_jax.data.plans import UnreadableImageError
from bluelm_jax.data.sample_plan import truncate
from bluelm_jax.data.sources import InvalidRecordError
from bluelm_jax.data.tokenizer import ByteTokenizer
from bluelm_jax.data_config import ByteTokens

BYTES = ByteTokenizer()
Q = SIDE * SIDE


def ids(text):
    return BYTES.encode(text)


def targets(example):
    return example.tokens[example.supervised].tolist()


def test_text_sample_token_by_token(tmp_path):
    made = one_example(tmp_path, record("a", "Hi", "Yes", "So", "No"))
    human, marker = ids("[|Human|]:"), ids("[|AI|]:")
    first = [1, *human, *ids("Hi"), *marker, *ids("Yes"), 2]
    second = [*human, *ids("So"), *marker, *ids("No"), 2]
    assert made.tokens.tolist() == first + second
    assert targets(made) == [*ids("Yes"), 2, *ids("No"), 2]
    assert (made.image_index == layout.TEXT).all()
    assert made.tiles.shape == (0, 28, 28, 3)
    assert (made.tokens.dtype, made.supervised.dtype) == (np.int32, np.bool_)


def test_image_positions_and_views(tmp_path):
    name = write_image(tmp_path, "a.png", 28, 28)
    made = one_example(tmp_path, record("a", "x<image>y", "Z", image=name))
    views = layout.num_views(28, 28, TILING)
    before = 1 + len("[|Human|]:") + 1
    expected = np.full(made.length, layout.TEXT)
    expected[before : before + views * Q] = np.arange(views * Q)
    np.testing.assert_array_equal(made.image_index, expected)
    assert (made.tokens[expected >= 0] == BYTES.pad_id).all()
    image = images.read_image(tmp_path / "a.png")
    np.testing.assert_array_equal(made.tiles, patching.make_views(image, TILING))


def test_several_images_count_on_and_share_the_budget(tmp_path):
    names = [write_image(tmp_path, f"{i}.png", 80, 30, seed=i) for i in range(3)]
    tiling = schemes.Tiling(scheme=schemes.InternVL15(max_tiles=6), tile_size=28)
    sample = record("a", "<image> and <image>", "One.", "<image>?", "Two.", image=names)
    made = one_example(tmp_path, sample, **{"layout": schemes.Plain()})
    config = dataclasses.replace(make_config(tmp_path / "one.json"), tiling=tiling)
    pipeline = type(make_pipeline(tmp_path / "one.json"))(config, side=SIDE)
    shared = pipeline.maker.make(sample, config.sources[0], "x")
    for example, used in ((made, TILING), (shared, tiling)):
        views = 3 * layout.num_views(80, 30, used, num_images=3)
        places = example.image_index[example.image_index >= 0]
        np.testing.assert_array_equal(places, np.arange(views * Q))
        assert len(example.tiles) == views
    assert shared.num_views < 3 * layout.num_views(80, 30, tiling)


def test_layout_tags_and_newlines(tmp_path):
    name = write_image(tmp_path, "a.png", 80, 30)
    sample = record("a", "<image>", "Z", image=name)
    tags = ("<slice>", "</slice>", "</image>")
    made = one_example(
        tmp_path,
        sample,
        layout=schemes.SliceTags(),
        tokenizer=ByteTokens(extra_special_tokens=tags),
    )
    wanted = layout.image_layout(80, 30, TILING, schemes.SliceTags(), SIDE)
    start = 1 + len("[|Human|]:")
    tokenizer = ByteTokenizer(tags)
    span = made.tokens[start : start + wanted.num_tokens]
    assert [tokenizer.token_text(i) for i in span[wanted.index == layout.TEXT]] == list(wanted.text)
    made = one_example(tmp_path, sample, layout=schemes.UnpadNewline())
    wanted = layout.image_layout(80, 30, TILING, schemes.UnpadNewline(), SIDE)
    np.testing.assert_array_equal(made.image_index[start : start + wanted.num_tokens], wanted.index)
    assert (wanted.index == layout.NEWLINE).any()


def test_missing_layout_tag_is_found_at_start_up(tmp_path):
    path = write_json(tmp_path / "a.json", [record("a", "Q", "A")])
    with pytest.raises(ValueError, match="image layout needs the token '</image>'"):
        make_pipeline(path, layout=schemes.SliceTags())


def test_special_tokens_in_content_stay_text(tmp_path):
    made = one_example(tmp_path, record("a", "</s>", "<s>"))
    assert made.tokens.tolist().count(1) == 1
    assert made.tokens.tolist().count(2) == 1
    assert targets(made) == [*ids("<s>"), 2]


def test_first_token_is_never_supervised(tmp_path):
    path = write_json(tmp_path / "a.json", [record("a", "", "A")])
    pipeline = make_pipeline(path, template="plain")
    example = pipeline.maker.make(pipeline.records[0][0], pipeline.config.sources[0], "x")
    assert example.tokens.tolist() == [1, *ids("A"), 2]
    assert example.supervised.tolist() == [False, True, True]


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8)), min_size=1, max_size=4))
@settings(max_examples=40)
def test_supervised_tokens_spell_the_answers(tmp_path_factory, pairs):
    texts = [text.replace("<image>", "") for pair in pairs for text in pair]
    folder = tmp_path_factory.mktemp("a")
    answers = [text.strip() for text in texts[1::2]]
    sample = record("a", *texts)
    if not any(answers):
        with pytest.raises(InvalidRecordError, match=r"sample 'a' of .*no token"):
            one_example(folder, sample, seq_len=2000)
        return
    made = one_example(folder, sample, seq_len=2000)
    assert targets(made) == [i for text in answers if text for i in [*ids(text), 2]]


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (record("b7", "<image>", "A"), "sample 'b7' of .*1 <image> in the turns, 0 images"),
        (record("b7", "Q", "A", image="a.png"), "0 <image> in the turns, 1 images"),
        (record("b7", "<image>", "A", image=["a.png", "a.png"]), "1 <image> .*, 2 images"),
        (record("b7", "Q", "A", image=3), "'image' must be a path or list of paths, got 3"),
        (record("b7", "Q", ""), "sample 'b7' of .*no token is supervised"),
        (record("b7", "Q"), "no token is supervised"),
        ({"id": "b7", "conversations": [turn("gpt", "A")]}, "sample 'b7' of .*no human turn"),
    ],
)
def test_invalid_records(tmp_path, sample, message):
    write_image(tmp_path, "a.png")
    with pytest.raises(InvalidRecordError, match=message):
        one_example(tmp_path, sample)
    skipped = one_example(tmp_path, sample, on_invalid_record="skip")
    assert isinstance(skipped, Skipped)
    assert skipped.reason == "invalid_record" and "b7" in skipped.detail


@pytest.mark.parametrize("entry", [{}, {"image": None}, {"image": ""}, {"image": []}])
def test_samples_without_image(tmp_path, entry):
    assert one_example(tmp_path, record("a", "Q", "A", model="x", **entry)).num_views == 0


def test_leading_assistant_turn_is_counted(tmp_path):
    sample = {"id": "a", "conversations": [turn("gpt", "x"), turn("human", "Q"), turn("gpt", "A")]}
    made = one_example(tmp_path, sample)
    assert [reason for reason, _ in made.events] == ["leading_turns_left_out"]


def overlong(folder, **fields):
    write_image(folder, "a.png", 28, 28)
    write_image(folder, "b.png", 28, 28)
    texts = ("1<image>2", "first answer", "3<image>4", "second answer")
    return one_example(folder, record("long", *texts, image=["a.png", "b.png"]), **fields)


def test_overlong_policies(tmp_path):
    length = overlong(tmp_path).length
    assert overlong(tmp_path, seq_len=length).events == ()
    message = f"sample 'long' of .*: {length} positions .*seq_len = {length - 1}"
    with pytest.raises(OverlongError, match=message):
        overlong(tmp_path, seq_len=length - 1)
    skipped = overlong(tmp_path, seq_len=length - 1, on_overlong="drop")
    assert isinstance(skipped, Skipped) and skipped.reason == "overlong"


def test_truncation_never_cuts_an_image(tmp_path):
    whole = overlong(tmp_path)
    places = np.flatnonzero(whole.image_index >= 0)
    starts = [int(at) for at in places if whole.image_index[at - 1] == layout.TEXT]
    second, stop = starts[1], int(places[-1]) + 1
    for limit in range(1, whole.length):
        made = overlong(tmp_path, seq_len=limit, on_overlong="truncate_text")
        answered = whole.supervised[:limit].any()
        if not answered or (starts[0] < limit < starts[0] + Q):
            assert isinstance(made, Skipped) and made.reason == "overlong"
            continue
        cut = second if second < limit < stop else limit
        assert made.length == cut
        np.testing.assert_array_equal(made.tokens, whole.tokens[:cut])
        np.testing.assert_array_equal(made.supervised, whole.supervised[:cut])
        assert made.num_views * Q == (made.image_index >= 0).sum()
        assert [reason for reason, _ in made.events] == ["truncated"]


def test_truncate_drops_the_views_of_later_images(tmp_path):
    overlong(tmp_path)
    pipeline = make_pipeline(tmp_path / "one.json")
    plan = pipeline.planner.plan(pipeline.records[0][0], pipeline.config.sources[0], "x")
    assert truncate(plan, plan.images[1].stop).num_views == plan.num_views
    assert truncate(plan, plan.images[1].stop - 1).length == plan.images[1].start


def test_too_many_tiles(tmp_path):
    name = write_image(tmp_path, "a.png", 80, 80)
    sample = record("big", "<image>", "A", image=name)
    views = layout.num_views(80, 80, TILING)
    message = f"'big' of .*: {views} tiles, tiles_per_group = {views - 1}"
    with pytest.raises(TooManyTilesError, match=message):
        one_example(tmp_path, sample, tiles_per_group=views - 1)
    assert isinstance(one_example(tmp_path, sample, tiles_per_group=views), Example)
    fields = {"tiles_per_group": views - 1, "on_too_many_tiles": "skip"}
    assert one_example(tmp_path, sample, **fields).reason == "too_many_tiles"


@pytest.mark.parametrize("kind", ["missing", "damaged", "outside"])
def test_unreadable_images(tmp_path, kind):
    name = write_image(tmp_path, "a.png", 60, 60)
    if kind == "missing":
        name = "b.png"
    elif kind == "outside":
        name = "../a.png"
    else:  # The header stays good, so the damage shows when pixels are decoded.
        data = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(data[: len(data) // 2])
    sample = record("bad", "see <image> now", "A", image=name)
    with pytest.raises(UnreadableImageError, match=f"sample 'bad' of .*: .*{name}"):
        one_example(tmp_path, sample)
    skipped = one_example(tmp_path, sample, on_unreadable_image="skip")
    assert isinstance(skipped, Skipped) and skipped.reason == "unreadable_image"
    made = one_example(tmp_path, sample, on_unreadable_image="replace_with_text_only")
    assert made.num_views == 0 and (made.image_index == layout.TEXT).all()
    assert BYTES.decode(made.tokens) == "[|Human|]:see  now[|AI|]:A"
    ((reason, detail),) = made.events
    assert reason == "replaced_with_text_only" and "'bad'" in detail


def test_prompt_and_reference(tmp_path):
    name = write_image(tmp_path, "a.png", 28, 28)
    sample = record("a", "<image>Q1", "A1", "Q2", "A2", image=name)
    whole = one_example(tmp_path, sample)
    pipeline = make_pipeline(tmp_path / "one.json")
    for index, reference in ((0, "A1"), (-1, "A2")):
        prompt = pipeline.maker.make_prompt(sample, pipeline.config.sources[0], "x", turn=index)
        assert prompt.reference == reference
        assert not prompt.supervised.any()
        assert BYTES.decode(prompt.tokens).endswith("[|AI|]:")
        np.testing.assert_array_equal(prompt.tokens, whole.tokens[: prompt.length])
        np.testing.assert_array_equal(prompt.image_index, whole.image_index[: prompt.length])
        answer = whole.tokens[prompt.length : prompt.length + 2]
        assert BYTES.decode(answer) == reference


def test_prompt_is_never_truncated(tmp_path):
    path = write_json(tmp_path / "a.json", [record("a", "Q" * 100, "A")])
    pipeline = make_pipeline(path, seq_len=50, on_overlong="truncate_text")
    with pytest.raises(OverlongError, match="seq_len = 50"):
        list(pipeline.prompts())
    (prompt,) = make_pipeline(path).prompts()
    assert prompt.reference == "A"


def test_half_a_surrogate_pair_is_an_invalid_record(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"id": "a", "conversations": [{"from": "human", "value": "\\ud800"}, '
                    '{"from": "gpt", "value": "x"}]}]')  # fmt: skip
    pipeline = make_pipeline(path)
    source, records = pipeline.config.sources[0], pipeline.records[0]
    with pytest.raises(InvalidRecordError, match=r"sample 'a' .*text is not Unicode"):
        pipeline.maker.make(records[0], source, records.where(0))


def test_resized_maps_carry_their_corners_into_the_batch(tmp_path):
    """The second image's corners count on from the first one's views; text has no weight."""
    name = write_image(tmp_path, "a.png", 84, 84)
    sample = record("a", "<image>x<image>", "A", image=[name, name])
    rule = schemes.UnpadNewline(anyres_max=1)
    pipeline = make_pipeline(write_json(tmp_path / "one.json", [sample]), layout=rule)
    source, records = pipeline.config.sources[0], pipeline.records[0]
    made = pipeline.maker.make(records[0], source, records.where(0))
    side = pipeline.planner.side
    wanted = layout.image_layout(84, 84, pipeline.config.tiling, rule, side, 2)
    assert wanted.corner_index is not None
    views = wanted.num_views * side**2
    first = int(np.flatnonzero(made.image_index != layout.TEXT)[0])
    second = first + wanted.num_tokens + 1
    for at, offset in ((first, 0), (second, views)):
        span = slice(at, at + wanted.num_tokens)
        np.testing.assert_array_equal(made.corner_index[span], wanted.corner_index + offset)
        np.testing.assert_array_equal(made.corner_weights[span], wanted.corner_weights)
    assert not made.corner_weights[made.image_index < 0].any()
    sums = made.corner_weights[made.image_index >= 0].sum(axis=1)
    np.testing.assert_allclose(sums, 1.0, atol=1e-6)
    shape = dataclasses.replace(pipeline.shape, tiles_per_group=made.num_views)
    batch = batching.assemble([(0, made)], shape)
    np.testing.assert_array_equal(batch["corner_index"][0, : made.length], made.corner_index)
    assert batch["corner_weights"].shape == (*batch["tokens"].shape, 4)
