"""Placing examples in rows, and the arrays of a batch."""

import dataclasses

import numpy as np
import pytest
from data_helpers import assert_same, make_pipeline, take, write_dataset
from hypothesis import given
from hypothesis import strategies as st

from bluelm_jax import layout
from bluelm_jax.data.batching import BatchShape, assemble, batch_prompts
from bluelm_jax.data.examples import Example
from bluelm_jax.data.packing import FirstFit
from bluelm_jax.data_config import Packing

SHAPE = BatchShape(
    batch_size=4,
    seq_len=12,
    tile_groups=2,
    tiles_per_group=3,
    tile_size=2,
    tokens_per_view=2,
    max_samples_per_row=None,
    pad_id=9,
)


def example(name, text, views=0, seed=1):
    """Image tokens first (two a view), then text; the last token is supervised."""
    rng = np.random.default_rng(seed)
    length = 2 * views + text
    index = np.full(length, layout.TEXT, np.int32)
    index[: 2 * views] = np.arange(2 * views)
    supervised = np.zeros(length, bool)
    supervised[-1] = True
    tokens = np.where(index >= 0, 9, rng.integers(10, 99, length)).astype(np.int32)
    tiles = rng.integers(1, 256, (views, 2, 2, 3), dtype=np.uint8)
    return Example(name, tokens, supervised, index, tiles)


def test_a_batch_by_hand():
    a, b, c = example("a", 2, 1, seed=1), example("b", 3, 2, seed=2), example("c", 1, 1, seed=3)
    batch = assemble([(0, a), (1, b), (2, c), (0, example("d", 2, 0, seed=4))], SHAPE)
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
        "tokens": ((4, 12), "int32"),
        "loss_weights": ((4, 12), "float32"),
        "positions": ((4, 12), "int32"),
        "segments": ((4, 12), "int32"),
        "image_index": ((4, 12), "int32"),
        "tiles": ((2, 3, 2, 2, 3), "uint8"),
    }
    assert batch["segments"][0].tolist() == [1, 1, 1, 1, 2, 2, 0, 0, 0, 0, 0, 0]
    assert batch["positions"][0].tolist() == [0, 1, 2, 3, 0, 1, 0, 0, 0, 0, 0, 0]
    assert batch["loss_weights"][0].tolist() == [0, 0, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0]
    assert batch["image_index"][0, :4].tolist() == [0, 1, -1, -1]
    # Row 1 shares group 0, whose first tile is a's; row 2 opens group 1.
    assert batch["image_index"][1, :7].tolist() == [2, 3, 4, 5, -1, -1, -1]
    assert batch["image_index"][2, :3].tolist() == [0, 1, -1]
    np.testing.assert_array_equal(batch["tiles"][0], np.concatenate([a.tiles, b.tiles]))
    np.testing.assert_array_equal(batch["tiles"][1, :1], c.tiles)
    assert not batch["tiles"][1, 1:].any()
    assert (batch["tokens"][3] == 9).all() and not batch["segments"][3].any()


def test_newlines_are_not_shifted():
    made = example("a", 3, 1)
    made.image_index[-1] = layout.NEWLINE
    batch = assemble([(0, example("b", 1, 1)), (1, made)], SHAPE)
    assert batch["image_index"][1, :5].tolist() == [2, 3, -1, -1, layout.NEWLINE]


def test_overflow_names_sample_and_numbers():
    with pytest.raises(ValueError, match="b: row 0 would hold 13 positions, seq_len = 12"):
        assemble([(0, example("a", 8)), (0, example("b", 5))], SHAPE)
    with pytest.raises(ValueError, match="b: group 0 would hold 4 tiles, tiles_per_group = 3"):
        assemble([(0, example("a", 1, 2)), (1, example("b", 1, 2))], SHAPE)


sizes = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3)), max_size=30)


@given(sizes, st.sampled_from([None, 1, 2]))
def test_packed_batch_holds_every_sample_whole(pairs, limit):
    shape = dataclasses.replace(SHAPE, max_samples_per_row=limit)
    packer, placed = FirstFit(shape), []
    for i, (text, views) in enumerate(pairs):
        made = example(str(i), text, views, seed=i)
        row = packer.place(made.length, views)
        if row is not None:
            placed.append((row, made))
    batch = assemble(placed, shape)
    seen = 0
    for row in range(4):
        mine = [each for at, each in placed if at == row]
        assert limit is None or len(mine) <= limit
        for segment, each in enumerate(mine, 1):
            at = batch["segments"][row] == segment
            np.testing.assert_array_equal(batch["tokens"][row][at], each.tokens)
            np.testing.assert_array_equal(batch["loss_weights"][row][at], each.supervised)
            np.testing.assert_array_equal(batch["positions"][row][at], np.arange(each.length))
            index = batch["image_index"][row][at]
            views = batch["tiles"][row // 2][index[index >= 0][::2] // 2]
            np.testing.assert_array_equal(views, each.tiles)
            seen += each.length
    assert (batch["segments"] > 0).sum() == seen
    assert batch["loss_weights"].sum() == len(placed)


def test_prompts_have_lengths():
    batch = batch_prompts([example("a", 3, 1), example("b", 2)], SHAPE)
    assert batch["lengths"].tolist() == [5, 2, 0, 0] and batch["lengths"].dtype == np.int32
    with pytest.raises(ValueError, match="5 prompts for batch_size = 4"):
        batch_prompts([example("a", 1)] * 5, SHAPE)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("tile_groups", 3, "a divisor of batch_size = 4"),
        ("seq_len", 0, "> 0"),
        ("tiles_per_group", -1, ">= 0"),
    ],
)
def test_shape_is_checked(field, value, message):
    with pytest.raises(ValueError, match=rf"BatchShape.{field} = {value}: must be {message}"):
        dataclasses.replace(SHAPE, **{field: value})


# Samples whose pixels turn out damaged --------------------------------------------------------------


def damaged_dataset(folder, bad):
    """Twelve samples with an image each; the pixels of `bad` are cut off behind a good header."""
    path = write_dataset(folder, count=12)
    for i in bad:
        image = folder / f"0-{i}.png"
        data = image.read_bytes()
        image.write_bytes(data[: len(data) // 2])
    return path


def answers(pipeline, batch):
    """The answer in every row; '' for an empty one."""
    rows = zip(batch["tokens"], batch["segments"], strict=True)
    texts = [pipeline.tokenizer.decode(tokens[segments > 0]) for tokens, segments in rows]
    return [text.rpartition("[|AI|]:")[2] for text in texts]


@pytest.mark.parametrize("policy", ["skip", "replace_with_text_only"])
@pytest.mark.parametrize("groups", [1, 2])
def test_damaged_pixels_leave_the_measured_room_right(tmp_path, policy, groups):
    """Headers promise a sample: its place is kept, so every other one stays in its row."""
    fields = {"tile_groups": groups, "on_unreadable_image": policy, "epochs": 3}
    whole = make_pipeline(write_dataset(tmp_path, count=12), **fields)
    expected = [answers(whole, batch) for batch in whole]
    path = damaged_dataset(tmp_path, bad=(2, 5, 6))
    bad = {i: whole.records[0][i]["conversations"][1]["value"] for i in (2, 5, 6)}
    room = make_pipeline(path, **fields).measure()
    sizes = {"seq_len": room.max_length, "tiles_per_group": room.tiles_per_group}
    pipeline = make_pipeline(path, **fields, **sizes)
    batches = iter(pipeline)
    found = [answers(pipeline, batch) for batch in batches]
    counts = batches.counters.counts
    if policy == "skip":
        expected = [["" if text in bad.values() else text for text in row] for row in expected]
        assert (counts["unreadable_image"], counts["samples"]) == (9, 27)
    else:
        assert (counts["replaced_with_text_only"], counts["samples"]) == (9, 36)
    assert found == expected and len(found) == 9


def test_damaged_pixels_in_a_packed_run_make_room_for_others(tmp_path):
    path = damaged_dataset(tmp_path, bad=(2, 5, 6))
    fields = {"on_unreadable_image": "skip", "epochs": 1, "drop_remainder": False}
    batches = iter(make_pipeline(path, packing=Packing(lookahead=4), seq_len=260, **fields))
    samples = sum(int(batch["segments"].max(axis=1).sum()) for batch in batches)
    assert samples == batches.counters.counts["samples"] == 9


def test_damaged_pixels_everywhere_are_an_error(tmp_path):
    path = damaged_dataset(tmp_path, bad=range(12))
    batches = iter(make_pipeline(path, on_unreadable_image="skip"))
    with pytest.raises(ValueError, match=r"every sample is left out; .*(damaged|truncated)"):
        for _ in range(20):
            next(batches)


def test_resume_next_to_an_empty_row(tmp_path):
    fields = {"on_unreadable_image": "skip", "shuffle": False, "num_threads": 0}
    path = damaged_dataset(tmp_path, bad=(3, 4))
    expected = take(iter(make_pipeline(path, **fields)), 4)
    assert not expected[0]["segments"][3].any() and not expected[1]["segments"][0].any()
    first = iter(make_pipeline(path, **fields))
    take(first, 1)
    second = iter(make_pipeline(path, **fields))
    second.set_state(first.get_state())
    assert_same(take(second, 3), expected[1:])
