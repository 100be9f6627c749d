"""Arms of an ablation: the room of their batches, and what is kept between starts."""

import dataclasses
import json
import types

import pytest
from data_helpers import record, write_dataset, write_image, write_json
from model_helpers import TINY, make_run, replace

from bluelm_jax import config, layout, params, schemes, serialize, train, vlm
from bluelm_jax.data.examples import OverlongError
from bluelm_jax.data.pipeline import Pipeline
from bluelm_jax.data_config import SourceConfig
from bluelm_jax.generate import SamplingConfig
from experiments import ablate, ablation, cli, evaluation, kept
from experiments.ablation import Ablation, Variant
from experiments.evaluation import EvalConfig

FIXED = schemes.Tiling(scheme=schemes.Fixed(), tile_size=TINY.vision.tile_size)


@pytest.fixture
def run(tmp_path):
    return make_run(write_dataset(tmp_path, count=8))


def make_ablation(run, **fields):
    variants = (Variant(name="fixed", label="Fixed", tiling=FIXED),)
    values = {"subject": "fixed", "evaluation": EvalConfig(batch_size=4)} | fields
    return Ablation(base=run, variants=variants, eval_source=run.data.sources[0], **values)


def test_room_is_what_the_batches_need(run):
    fitted = ablation.fit_room(run)
    longest = max(e.length for e in Pipeline(fitted.data, side=fitted.token_side).prompts())
    assert longest < fitted.data.seq_len < 128
    assert fitted.data.tiles_per_group == 4


def test_a_sample_beyond_the_model_is_named_or_dropped_by_policy(tmp_path):
    samples = [record(f"s{i}", "Q", "A" * length) for i, length in enumerate([3, 5, 900, 4])]
    run = make_run(write_json(tmp_path / "a.json", samples))
    fitted = ablation.fit_room(run)
    assert fitted.data.seq_len == TINY.decoder.max_length
    with pytest.raises(OverlongError, match="sample 's2'"):
        for batch in iter(Pipeline(fitted.data, side=fitted.token_side)):
            del batch
    dropping = replace(run, "data", on_overlong="drop", epochs=1)
    fitted = ablation.fit_room(dropping)
    batches = iter(Pipeline(fitted.data, side=fitted.token_side))
    with pytest.raises(StopIteration):
        next(batches)
    assert batches.counters.counts["overlong"] == 1


def test_no_sample_left_names_the_file(tmp_path):
    path = write_json(tmp_path / "a.json", [record("a", "Q", "")])
    run = make_run(path, data={"on_invalid_record": "skip"})
    with pytest.raises(ValueError, match=r"no sample of .*a\.json is left"):
        ablation.fit_room(run)


def test_seconds_of_an_interrupted_start_count(run, tmp_path, monkeypatch):
    def interrupted(run, directory, progress):
        directory.mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", interrupted)
    clock = iter([10.0, 16.0])
    monkeypatch.setattr(ablation.time, "monotonic", lambda: next(clock))
    with pytest.raises(KeyboardInterrupt):
        ablation.train_or_resume(run, tmp_path / "arm")
    assert kept.load(tmp_path / "arm" / "seconds.json", "seconds of training") == 6.0


def test_kept_results_belong_to_their_settings(tmp_path):
    path = tmp_path / "x.json"
    assert kept.load(path, {"a": 1}) is None
    kept.save(path, {"a": (1, 2)}, [3, "ä"])
    assert kept.load(path, {"a": [1, 2]}) == [3, "ä"]
    assert kept.load(path, {"a": [1, 3]}) is None
    path.write_text("{")
    assert kept.load(path, {"a": [1, 2]}) is None
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_readings_are_made_again_when_the_evaluation_changes(run, tmp_path):
    run = replace(run, "train", steps=2, save_every=2)
    run = replace(run, "data", batch_size=8, tile_groups=8)  # a row for each of eight devices
    sampling = SamplingConfig(max_new_tokens=14)
    plan = make_ablation(run, evaluation=EvalConfig(batch_size=4, sampling=sampling))
    first = ablation.run_arm(plan, plan.variants[0], 0, tmp_path / "w")
    assert len(first.readings) == 8 and first.seconds > 0
    again = ablation.run_arm(plan, plan.variants[0], 0, tmp_path / "w")
    assert again.readings == first.readings and again.seconds == first.seconds
    fewer = dataclasses.replace(
        plan, evaluation=EvalConfig(limit=3, batch_size=4, sampling=sampling)
    )
    assert len(ablation.run_arm(fewer, plan.variants[0], 0, tmp_path / "w").readings) == 3


def test_another_config_in_a_used_directory_is_refused_by_field(run, tmp_path):
    directory = tmp_path / "w"
    (directory / "checkpoints" / "2").mkdir(parents=True)
    (directory / "config.json").write_text(serialize.to_json(run))
    cli.check_same_run(run, directory)
    cli.check_same_run(replace(run, "train", steps=9, log_every=3), directory)
    other = replace(run, "train", seed=5)
    with pytest.raises(ValueError, match=r"1 differences: train.seed 0 -> 5\. Choose another"):
        cli.check_same_run(other, directory)


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"subject": "relaxd"}, "one of the variants"), ({"seeds": (1, 1)}, "all different")],
)
def test_ablation_is_checked(run, fields, message):
    with pytest.raises(ValueError, match=message):
        make_ablation(run, **fields)


def test_images_beside_the_file_are_found_without_an_image_root(tmp_path, capsys):
    name = write_image(tmp_path, "a.png", 30, 20)
    path = write_json(tmp_path / "a.json", [record("a", "<image>", "Answer", image=name)])
    run = make_run(path)
    weights = params.init(vlm.specs(run.model), params.jax.random.key(0))
    cfg = EvalConfig(batch_size=1, sampling=SamplingConfig(max_new_tokens=3))
    (reading,) = evaluation.evaluate(weights, run, SourceConfig(path=str(path)), cfg)
    said = capsys.readouterr().err
    assert "max_new_tokens = 3 is too short for the references of 1 of 1" in said
    assert reading.image == str(tmp_path / name) and reading.grid == (1, 1)
    assert json.dumps(dataclasses.asdict(reading))


# Arms that differ in the model ------------------------------------------------------------------------


DOWNSAMPLERS = (
    Variant(name="base", label="as it is"),
    Variant(name="pool", label="mean", downsampler=config.AvgPool(factor=5)),
    Variant(name="queries", label="queries", downsampler=config.Resampler(num_queries=7, head_dim=8),
            projector=config.ProjectorConfig(depth=0)),
)  # fmt: skip


def test_a_variant_changes_what_it_names(run):
    base, pool, queries = (variant.apply(run) for variant in DOWNSAMPLERS)
    assert base == run and pool.data == queries.data == run.data
    assert pool.model == dataclasses.replace(run.model, downsampler=config.AvgPool(factor=5))
    assert queries.model.projector.depth == 0 and queries.token_side == layout.Unordered(7)
    tiled = Variant(name="t", label="t", tiling=dataclasses.replace(FIXED, pad_color=(1, 1, 1)))
    assert tiled.apply(run).data.tiling.pad_color == (1, 1, 1) and tiled.apply(run).model == TINY


def test_rows_have_room_for_the_tokens_of_each_downsampler(run):
    lengths = [ablation.variant_run(run, v, 0).data.seq_len for v in DOWNSAMPLERS]
    assert [length - lengths[0] for length in lengths] == [0, 1 - 9, 7 - 9]


def test_what_is_compared_is_said(run):
    def compared(*variants):
        plan = make_ablation(run)
        names = [dataclasses.replace(v, name=f"v{i}") for i, v in enumerate(variants)]
        return dataclasses.replace(plan, variants=tuple(names), subject="v0").compared

    fixed = Variant(name="fixed", label="Fixed", tiling=FIXED)
    assert compared(fixed) == "tiling scheme"
    assert compared(*DOWNSAMPLERS) == "token downsampler"
    assert compared(fixed, DOWNSAMPLERS[1]) == "variant"


def test_an_arm_of_another_downsampler_end_to_end(run, tmp_path):
    run = replace(run, "train", steps=2, save_every=2)
    run = replace(run, "data", batch_size=8, tile_groups=8)
    evaluated = EvalConfig(batch_size=4, limit=4, sampling=SamplingConfig(max_new_tokens=14))
    plan = dataclasses.replace(
        make_ablation(run, evaluation=evaluated), variants=DOWNSAMPLERS[2:], subject="queries"
    )
    (found,), samples = ablation.run_ablation(plan, tmp_path)
    assert found.name == "queries" and set(found.tokens) == {7} and len(samples) == 4


def test_only_some_arms(run, tmp_path, monkeypatch, capsys):
    plan = dataclasses.replace(make_ablation(run), variants=DOWNSAMPLERS, subject="base")
    part = ablation.select(plan, ["queries", "base"])
    assert [v.name for v in part.variants] == ["base", "queries"] and part.subject == "base"
    monkeypatch.setattr(ablate, "ONLY", types.SimpleNamespace(value=["queries", "pool"]))
    part = ablate.chosen_part(plan)
    assert part is not None
    assert [v.name for v in part.variants] == ["pool", "queries"] and part.subject == "pool"
    said = "only pool, queries; compared with pool, as the plan's subject base is left out\n"
    assert capsys.readouterr().out == said
    info = ablate.run_info(ablation.select(plan, ["pool"]), 1.0, plan)
    assert info["config"]["variants"] == "pool (--only; 1 of 3)"
    assert info.get("compared") == "token downsampler"
    assert ablate.report_directory(tmp_path, part, plan) == tmp_path / "only-pool-queries"
    assert ablate.report_directory(tmp_path, plan, None) == tmp_path


@pytest.mark.parametrize(
    ("names", "message"),
    [(["pool", "mean"], "no variant is named 'mean'; .* are base, pool, queries"), ([], "no name")],
)
def test_only_names_variants(run, names, message):
    plan = dataclasses.replace(make_ablation(run), variants=DOWNSAMPLERS, subject="base")
    with pytest.raises(ValueError, match=f"--only: {message}"):
        ablation.select(plan, names)


def test_parameters_of_every_arm_are_told(run):
    plan = make_ablation(run)
    assert "," not in ablate.parameters(plan).replace(",", "", 1)
    several = dataclasses.replace(plan, variants=DOWNSAMPLERS, subject="base")
    text = ablate.parameters(several)
    assert text.startswith("as it is ") and ", mean " in text and ", queries " in text
