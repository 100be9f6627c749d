"""Prompts of evaluation obey the policies of training, and say what they left out or changed."""

import types

import pytest
from data_helpers import make_pipeline, record, write_image, write_json
from model_helpers import TINY, make_run, replace

from bluelm_jax import params, schemes, vlm
from bluelm_jax.data.counters import Counters
from bluelm_jax.data.examples import OverlongError
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data.plans import UnreadableImageError
from bluelm_jax.data.sources import InvalidRecordError
from bluelm_jax.generate import SamplingConfig
from experiments import eval_settings, evaluation
from experiments.evaluation import EvalConfig
from gin_configs import binding, command

ROOM = TINY.decoder.max_length
SKIP = {
    "on_invalid_record": "skip",
    "on_unreadable_image": "skip",
    "on_overlong": "drop",
    "on_too_many_tiles": "skip",
}


@pytest.fixture
def path(tmp_path):
    """Good, broken JSON, no turns, missing image, damaged pixels, too long, good."""
    write_image(tmp_path, "a.png", 28, 28)
    write_image(tmp_path, "torn.png", 28, 28, seed=1)
    data = (tmp_path / "torn.png").read_bytes()
    (tmp_path / "torn.png").write_bytes(data[: len(data) // 2])
    samples = [
        record("good", "<image>Q", "A", image="a.png"),
        {"id": "turns", "conversations": []},
        record("missing", "<image>Q", "B", image="none.png"),
        record("torn", "<image>Q", "C", image="torn.png"),
        record("long", "Q" * 120, "D"),
        record("last", "Q", "E"),
    ]
    lines = write_json(tmp_path / "a.json", samples).read_text()[1:-1].split(', {"id"')
    text = "\n".join([lines[0], '{"id": "bro', *('{"id"' + line for line in lines[1:])])
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    return path


def prompts(path, **fields):
    counters = Counters()
    pipeline = make_pipeline(path, **({"seq_len": 100} | fields))
    return list(pipeline.prompts(counters=counters)), counters


def test_policies_that_leave_out(path):
    made, counters = prompts(path, **SKIP)
    assert [p.reference for p in made] == ["A", "E"]
    assert counters.counts == {"invalid_record": 2, "unreadable_image": 2, "overlong": 1}
    assert "a.jsonl[1]" in counters.names["invalid_record"][0]


def test_text_takes_the_place_of_bad_images_in_header_and_pixels(path):
    fields = SKIP | {"on_unreadable_image": "replace_with_text_only"}
    made, counters = prompts(path, **fields)
    assert [(p.reference, p.num_views > 0) for p in made] == [
        ("A", True), ("B", False), ("C", False), ("E", False)
    ]  # fmt: skip
    assert counters.counts == {"invalid_record": 2, "replaced_with_text_only": 2, "overlong": 1}
    tokenizer = make_pipeline(path).tokenizer
    assert tokenizer.decode(made[1].tokens) == "[|Human|]:Q[|AI|]:"


@pytest.mark.parametrize(
    ("field", "error"),
    [
        ("on_invalid_record", InvalidRecordError),
        ("on_unreadable_image", UnreadableImageError),
        ("on_overlong", OverlongError),
    ],
)
def test_policies_that_raise(path, field, error):
    with pytest.raises(error):
        prompts(path, **(SKIP | {field: "raise"}))


def test_reference_and_prompt_are_those_of_training(path):
    """Text-only prompts are the beginning of the text-only sample that training would make."""
    fields = SKIP | {"on_unreadable_image": "replace_with_text_only", "seq_len": 100}
    made, _ = prompts(path, **fields)
    pipeline = make_pipeline(path, **fields)
    source, records = pipeline.config.sources[0], pipeline.records[0]
    for index, prompt in zip((0, 3, 4, 6), made, strict=True):
        whole = pipeline.maker.make(records[index], source, records.where(index))
        assert whole.name == prompt.name
        assert whole.tokens[: prompt.length].tolist() == prompt.tokens.tolist()
        assert whole.num_views == prompt.num_views


def test_evaluation_reads_what_the_policies_leave(path, capsys):
    run = make_run(path)
    fields = SKIP | {"on_unreadable_image": "replace_with_text_only"}
    run = replace(run, "data", **fields)
    weights = params.init(vlm.specs(run.model), params.jax.random.key(0))
    cfg = EvalConfig(batch_size=2, sampling=SamplingConfig(max_new_tokens=3))
    steps, counters = [], Counters()
    readings = evaluation.evaluate(weights, run, run.data.sources[0], cfg, steps.append, counters)
    assert [r.reference for r in readings][:3] == ["A", "B", "C"]
    assert [r.grid is None for r in readings][:3] == [False, True, True]
    assert [r.bucket for r in readings][:3] == ["square", "text", "text"]
    said = capsys.readouterr().err
    assert said.startswith("left out or changed: invalid_record 2, replaced_with_text_only 2")
    assert "sample 'turns'" in said and "evaluation.py" not in said
    assert evaluation.left_out(counters) == 2 and len(readings) == 5
    assert steps[-1] == 7, "the bar ends full"


def evaluated(folder, samples, new_tokens=4, **data):
    run = replace(make_run(write_json(folder / "e.json", samples)), "data", **data)
    weights = params.init(vlm.specs(run.model), params.jax.random.key(0))
    cfg = EvalConfig(batch_size=2, sampling=SamplingConfig(max_new_tokens=new_tokens))
    counters = Counters()
    source = run.data.sources[0]
    return evaluation.evaluate(weights, run, source, cfg, counters=counters), counters


def test_a_long_answer_takes_no_room_from_its_prompt(tmp_path):
    samples = [record("a", "Q", "A" * 900), record("b", "Question", "B")]
    readings, counters = evaluated(tmp_path, samples)
    assert [len(r.reference) for r in readings] == [900, 1] and not counters.counts


def test_a_prompt_without_room_for_an_answer_obeys_the_policy(tmp_path):
    samples = [
        record("a", "Q", "A"),
        record("long", "Q" * 90, "B"),
    ]
    run = make_run(write_json(tmp_path / "l.json", samples[1:]), data={"seq_len": ROOM})
    (length,) = [p.length for p in Pipeline(run.data, side=run.token_side).prompts()]
    assert len(evaluated(tmp_path, samples, ROOM - length)[0]) == 2
    new = ROOM + 1 - length
    message = rf"'long'.*prompt of {length} positions \(0 of images\) \+ {new} new tokens exceeds"
    with pytest.raises(
        OverlongError, match=message + rf" max_length = {ROOM} .*on_overlong = 'drop'"
    ):
        evaluated(tmp_path, samples, new)
    readings, counters = evaluated(tmp_path, samples, new, on_overlong="drop")
    assert [r.reference for r in readings] == ["A"] and counters.counts == {"overlong": 1}
    with pytest.raises(ValueError, match=f"max_new_tokens = {ROOM}: leaves no room"):
        evaluated(tmp_path, samples, ROOM)


@pytest.mark.parametrize(
    ("bindings", "new", "temperature"),
    [
        ((), 32, 0.0),
        (("SamplingConfig.max_new_tokens = 8",), 8, 0.0),
        (("SamplingConfig.temperature = 0.5",), 32, 0.5),
        (
            ("EvalConfig.sampling = @a/SamplingConfig()", "a/SamplingConfig.max_new_tokens = 5"),
            5,
            0,
        ),
    ],
)
def test_bindings_of_sampling(bindings, new, temperature, monkeypatch):
    monkeypatch.setattr(command, "GIN_FILE", types.SimpleNamespace(value=[]))
    monkeypatch.setattr(command, "GIN_BINDINGS", types.SimpleNamespace(value=list(bindings)))
    found = eval_settings.eval_config(None, None)
    assert (found.sampling.max_new_tokens, found.sampling.temperature) == (new, temperature)
    changed = eval_settings.eval_config(3, 2)
    assert changed.sampling.max_new_tokens == 3 and changed.limit == 2
    unread = [*bindings, "DataConfig.seq_len = 5"]
    monkeypatch.setattr(command, "GIN_BINDINGS", types.SimpleNamespace(value=unread))
    with pytest.raises(binding.ConfigError, match=r"read by nothing: DataConfig\.seq_len \("):
        eval_settings.eval_config(None, None)


def test_an_empty_answer_is_not_scored(tmp_path):
    samples = [record("a", "Q", "A"), record("empty", "Q", " ")]
    readings, counters = evaluated(tmp_path, samples, on_invalid_record="skip")
    assert [r.reference for r in readings] == ["A"] and counters.counts == {"invalid_record": 1}
    with pytest.raises(
        InvalidRecordError, match=r"'empty'.* is empty .*on_invalid_record = 'skip'"
    ):
        evaluated(tmp_path, samples)
    with pytest.raises(ValueError, match=r"no sample of .*e\.json is left"):
        evaluated(tmp_path, samples[1:], on_invalid_record="skip")


def test_torn_images_that_were_measured_leave_room_for_other_mates(tmp_path):
    """Batches are measured from headers; pixels may then move samples into other batches."""
    tiling = schemes.Tiling(scheme=schemes.Relaxed(), tile_size=TINY.vision.tile_size)
    wide = [write_image(tmp_path, f"{i}.png", 56, 28, seed=i) for i in range(2)]
    torn = write_image(tmp_path, "torn.png", 10, 10, seed=9)
    (tmp_path / torn).write_bytes((tmp_path / torn).read_bytes()[:-40])
    samples = [
        record(str(i), "<image>Q", "A", image=name)
        for i, name in enumerate((wide[0], torn, wide[1]))
    ]
    readings, counters = evaluated(tmp_path, samples, on_unreadable_image="skip", tiling=tiling)
    assert [r.views > 1 for r in readings] == [True, True]
    assert counters.counts == {"unreadable_image": 1}
