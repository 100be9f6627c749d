"""Prompts of evaluation obey the policies of training, and say what they left out or changed."""

import warnings

import pytest
from data_helpers import make_pipeline, record, write_image, write_json
from model_helpers import make_run, replace

from bluelm_jax import params, vlm
from bluelm_jax.data.counters import Counters
from bluelm_jax.data.examples import OverlongError
from bluelm_jax.data.plans import UnreadableImageError
from bluelm_jax.data.sources import InvalidRecordError
from bluelm_jax.generate import SamplingConfig
from experiments import evaluation
from experiments.evaluation import EvalConfig

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


def test_evaluation_reads_what_the_policies_leave(path):
    run = make_run(path)
    fields = SKIP | {"on_unreadable_image": "replace_with_text_only"}
    run = replace(run, "data", **fields)
    weights = params.init(vlm.specs(run.model), params.jax.random.key(0))
    cfg = EvalConfig(batch_size=2, sampling=SamplingConfig(max_new_tokens=3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        readings = evaluation.evaluate(weights, run, run.data.sources[0], cfg)
    assert [r.reference for r in readings][:3] == ["A", "B", "C"]
    assert [r.grid is None for r in readings][:3] == [False, True, True]
    assert [r.bucket for r in readings][:3] == ["square", "text", "text"]
    (message,) = [str(w.message) for w in caught if "not read as they are" in str(w.message)]
    assert "invalid_record 2" in message and "replaced_with_text_only 2" in message
    assert "sample 'turns'" in message
