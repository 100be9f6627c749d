"""Run folders into folders that others read, and the tokenizers that go along."""

import dataclasses
import json
import shutil

import pytest
from model_helpers import make_run
from tokenizers import Tokenizer, models, pre_tokenizers
from weights_helpers import (
    BFLOAT16,
    LLM,
    MODEL,
    RUN,
    TOWER,
    assert_same_bits,
    leaves,
    llm_folder,
    make,
    read_folder,
    restored,
    sources,
    vision_folder,
)

from bluelm_jax import config, serialize, vlm
from bluelm_jax.weights import WeightsError, exporting, model_config, tokenizer_files


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return {
        "llm": llm_folder(root / "llm", shards=3, dtype=BFLOAT16),
        "vision": vision_folder(root / "vision"),
    }


@pytest.fixture(scope="module")
def imported(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "imported"
    make(out, RUN, sources(folders))
    return out


@pytest.mark.parametrize("kind", ["keep", "bfloat16"])
def test_round_trip(imported, folders, tmp_path, kind):
    """In, out, in and out again: bits stay."""
    sizes = exporting.export_run(imported, tmp_path / "one", dtype=kind, max_bytes=3000)
    assert set(sizes) == {"llm", "vision", "connector"}
    assert sum(sizes.values()) == exporting.total_bytes(imported, kind)
    first = {name: read_folder(tmp_path / "one" / name) for name in sizes}
    assert_same_bits(first["llm"], read_folder(folders["llm"]))
    if kind == "keep":
        assert_same_bits(first["vision"], read_folder(folders["vision"]))
    again = {name: tmp_path / "one" / name for name in sizes}
    found = sources(again, *again)
    model = model_config.model_for(found, None)
    assert model == MODEL
    make(tmp_path / "run", dataclasses.replace(RUN, model=model), found, seed=None)
    exporting.export_run(tmp_path / "run", tmp_path / "two")
    for name, tensors in first.items():
        assert_same_bits(read_folder(tmp_path / "two" / name), tensors)


def test_a_tower_read_early_goes_out_and_comes_back(tmp_path):
    early = dataclasses.replace(TOWER, feature="penultimate")
    run = make_run(model=dataclasses.replace(MODEL, vision=early))
    found = sources({"vision": vision_folder(tmp_path / "vision")}, "vision")
    make(tmp_path / "run", run, found, seed=None)
    exporting.export_run(tmp_path / "run", tmp_path / "out")
    again = sources({"vision": tmp_path / "out" / "vision"}, "vision")
    assert again.vision.vision_config() == early
    make(tmp_path / "run2", run, again, seed=None)
    specs = {"vision": vlm.specs(run.model)["vision"]}
    one, two = (restored(tmp_path / name, specs) for name in ("run", "run2"))
    assert_same_bits(leaves(one), leaves(two))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"downsampler": config.AvgPool(factor=3)},
            r"downsampler: VilaConcat.*, the model has Avg",
        ),
        ({"newline": False}, "newline: True, the model has False"),
        (
            {"projector": config.ProjectorConfig(activation="silu")},
            "projector: .*'gelu'.*, the model has .*'silu'",
        ),
    ],
)
def test_a_connector_of_another_model_is_refused(imported, tmp_path, changes, message):
    """Also where every tensor would fit."""
    exporting.export_run(imported, tmp_path / "out")
    found = sources({"connector": tmp_path / "out" / "connector"}, "connector")
    assert model_config.model_for(found, MODEL) == MODEL
    with pytest.raises(WeightsError, match=rf"connector holds another model: {message}"):
        model_config.model_for(found, dataclasses.replace(MODEL, **changes))


def test_an_export_of_another_model_is_refused(imported, tmp_path):
    copy = shutil.copytree(imported, tmp_path / "run")
    wide = dataclasses.replace(MODEL, decoder=dataclasses.replace(LLM, mlp_dim=32))
    (copy / "config.json").write_text(serialize.to_json(dataclasses.replace(RUN, model=wide)))
    with pytest.raises(WeightsError, match=r"down/kernel: shape \(3, 24, 16\), config.json says"):
        exporting.export_run(copy, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Tokenizers --------------------------------------------------------------------------------------


def write_tokenizer(folder, words, **settings):
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_special_tokens([word for word in words if word.startswith("<")])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


CHATML = ("<unk>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system")


def test_a_tokenizer_and_its_template(tmp_path):
    write_tokenizer(
        tmp_path, CHATML, bos_token={"content": "<|im_start|>"}, eos_token="<|im_end|>",
        chat_template="{{ '<|im_start|>' + message.role }}",
    )  # fmt: skip
    found = tokenizer_files.find(tmp_path, {})
    assert found.template == "chatml" and found.path == tmp_path / "tokenizer.json"
    assert (found.choice.path, found.choice.bos, found.choice.eos) == (
        "tokenizer.json", "<|im_start|>", "<|im_end|>",
    )  # fmt: skip
    tokenizer_files.check_fits(found, "chatml", 40)
    assert found.system == ""
    with pytest.raises(WeightsError, match="has 6 ids, the model's vocabulary 5"):
        tokenizer_files.check_fits(found, "chatml", 5)
    with pytest.raises(WeightsError, match=r"'<\|begin_of_text\|>'.*choose another template"):
        tokenizer_files.check_fits(found, "llama3", 40)


def test_special_tokens_by_id_and_template_by_model(tmp_path):
    write_tokenizer(tmp_path, ("<unk>", "<s>", "</s>"))
    found = tokenizer_files.find(
        tmp_path, {"model_type": "minicpm", "bos_token_id": 1, "eos_token_id": [2, 0]}
    )
    assert (found.choice.bos, found.choice.eos, found.template) == ("<s>", "</s>", "minicpm")
    write_tokenizer(tmp_path, ("<unk>",), eos_token="</s>")
    with pytest.raises(WeightsError, match="eos token '</s>' is not in the vocabulary"):
        tokenizer_files.find(tmp_path, {})


def test_no_tokenizer(tmp_path):
    assert tokenizer_files.find(tmp_path, {}) == tokenizer_files.Found(None, None, None)


def test_the_run_finds_its_tokenizer_wherever_it_is_moved(folders, tmp_path):
    write_tokenizer(tmp_path, CHATML, eos_token="<|im_end|>")
    found = tokenizer_files.find(tmp_path, {})
    data = dataclasses.replace(RUN.data, tokenizer=found.choice)
    run = dataclasses.replace(RUN, data=data)
    files = {"tokenizer.json": found.path}
    make(tmp_path / "a", run, sources(folders, "llm"), seed=None, files=files)
    (tmp_path / "a").rename(tmp_path / "b")
    choice = serialize.load_run_config(tmp_path / "b").data.tokenizer
    assert choice.path == str(tmp_path / "b" / "tokenizer.json")
    exporting.export_run(tmp_path / "b", tmp_path / "out")
    settings = json.loads((tmp_path / "out" / "llm" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|im_end|>"
    assert json.loads((tmp_path / "out" / "llm" / "config.json").read_text())["eos_token_id"] == 2
    assert tokenizer_files.find(tmp_path / "out" / "llm", {}).choice == found.choice


def test_ids_with_gaps_do_not_hide_from_the_vocabulary(tmp_path):
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 500}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    found = tokenizer_files.find(tmp_path, {})
    tokenizer_files.check_fits(found, "bluelm", 501)
    with pytest.raises(WeightsError, match="has 501 ids, the model's vocabulary 500"):
        tokenizer_files.check_fits(found, "bluelm", 500)
