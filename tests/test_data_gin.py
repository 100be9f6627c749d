"""The paper's mixtures as gin files: what they hold, what they ask for, and the table they print."""

import pytest

from bluelm_jax.run_config import RunConfig
from experiments import gin_setup, run_summary
from gin_configs import binding

# Samples as the paper counts them (sec. 4): stage 1 in thousands, stage 2 in millions.
STAGES = {
    "bluelm_v_stage1": {"llava_558k": 558, "sharegpt4v": 1200, "allava": 708},
    "bluelm_v_stage2": {
        "text_public": 2.2, "text_in_house": 64.7,
        "caption_public": 10.0, "caption_in_house": 306.3,
        "vqa_public": 20.3, "vqa_in_house": 44.4,
        "ocr_public": 23.3, "ocr_in_house": 173.9,
    },
}  # fmt: skip
stages = pytest.mark.parametrize("stage", STAGES)


def build(stage, *bindings):
    assert gin_setup.PRESETS  # Importing it is what registers the classes.
    files = [f"gin_configs/train/{stage}.gin", f"gin_configs/data/{stage}.gin"]
    return binding.build(RunConfig, files, bindings)


def paths(stage):
    return [f"{name}/SourceConfig.path = 'no/{name}.json'" for name in STAGES[stage]]


@stages
def test_sources_have_the_papers_sizes(stage):
    run = build(stage, *paths(stage), "SourceConfig.image_root = 'images'")
    found = {source.name: source.weight for source in run.data.sources}
    assert found == STAGES[stage]
    for source in run.data.sources:
        assert source.path == f"no/{source.name}.json" and source.image_root == "images"
    assert run.data.template == "minicpm" and run.data.packing is not None


@stages
def test_every_missing_path_is_named(stage):
    for name in STAGES[stage]:
        given = [line for line in paths(stage) if not line.startswith(f"{name}/")]
        with pytest.raises(binding.ConfigError, match=rf"\b{name}/SourceConfig\.path .*REQUIRED"):
            build(stage, *given)


@stages
def test_the_training_file_alone_has_one_source(stage):
    files = [f"gin_configs/train/{stage}.gin"]
    run = binding.build(RunConfig, files, ["SourceConfig.path = 'a.json'"])
    assert [source.path for source in run.data.sources] == ["a.json"]


@stages
def test_dry_run_prints_shares_and_epochs_without_the_files(stage):
    text = run_summary.describe_mixture(build(stage, *paths(stage)))
    total = sum(STAGES[stage].values())
    for name, size in STAGES[stage].items():
        (line,) = (x for x in text.splitlines() if x.split()[0] == name)
        assert "not found" in line and f"{100 * size / total:.1f} %" in line
        assert f"{name}: no/{name}.json: no such file" in text


def test_sources_may_differ_in_every_field():
    fields = {
        "first": "10", "template": "'plain'", "image_root": "'own'", "tiling": "@one_view/Tiling()",
    }  # fmt: skip
    bindings = [f"allava/SourceConfig.{key} = {value}" for key, value in fields.items()]
    one_view = ["one_view/Tiling.scheme = @Fixed()"]
    run = build("bluelm_v_stage1", *paths("bluelm_v_stage1"), *bindings, *one_view)
    last = run.data.sources[2]
    assert (last.first, last.template, last.image_root) == (10, "plain", "own")
    assert last.tiling is not None and run.data.sources[0].tiling is None
