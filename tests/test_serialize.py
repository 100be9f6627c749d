"""Configs to JSON and back."""

import dataclasses
import json

import pytest
from model_helpers import TINY, make_run, replace

from bluelm_jax import config, data_config, presets, run_config, schemes, serialize

TILING = schemes.Tiling(
    scheme=schemes.Relaxed(alpha=0.05, grids=((1, 2), (2, 1)), max_total_loss=0.3),
    tile_size=20,
    fit="stretch",
    thumbnail="first",
    single_tile_thumbnail=True,
    pad_color=(1, 2, 3),
)
FULL = replace(
    replace(make_run(model=dataclasses.replace(TINY, newline=True)), "train", init_from="runs/a"),
    "data",
    tiling=TILING,
    layout=schemes.UnpadNewline(anyres_max=9),
    tokenizer=data_config.TokenizerFile(path="t.json", pad="<pad>"),
    packing=data_config.Packing(lookahead=3),
    epochs=2,
)

# One object of every config class, with other values than the defaults.
EXAMPLES = [
    FULL,
    presets.siglip_so400m(),
    config.VilaConcat(factor=3),
    config.PixelShuffle(factor=3),
    config.AvgPool(factor=3),
    config.Resampler(num_queries=96),
    config.Identity(),
    config.ProjectorConfig(depth=1, activation="silu"),
    presets.minicpm_2b(),
    presets.bluelm_v_3b(),
    config.OptimConfig(clip_norm=None, peak_lr=1 / 3),
    config.MeshConfig(data=2, fsdp=2, tensor=2),
    config.TrainConfig(steps=100, trainable=("projector", "downsampler")),
    data_config.ByteTokens(extra_special_tokens=("[|Human|]:", "é\n")),
    data_config.TokenizerFile(path="a", eos=None),
    data_config.SentencePieceFile(path="b"),
    data_config.SourceConfig(path="c", weight=0.1, template="plain"),
    data_config.SourceConfig(path="d", name="n", repeat=1.5, random=9, tiling=TILING),
    data_config.SourceConfig(path="e", first=7),
    data_config.Packing(max_samples_per_row=2),
    FULL.data,
    schemes.LlavaNext(grids=schemes.GRIDS_LLAVA_P5),
    schemes.InternVL15(max_tiles=6, thumbnail=False),
    schemes.MiniCPMV(max_slices=4),
    schemes.Fixed(fit="pad"),
    schemes.Relaxed(),
    TILING,
    schemes.Plain(),
    schemes.UnpadNewline(allow_empty=True),
    schemes.SliceTags(),
]


@pytest.mark.parametrize("value", EXAMPLES, ids=lambda v: type(v).__name__)
def test_round_trip(value):
    text = serialize.to_json(value)
    back = serialize.from_json(text)
    assert back == value and hash(back) == hash(value) and type(back) is type(value)
    assert serialize.to_json(back) == text


def test_the_examples_cover_every_class():
    assert {type(v) for v in EXAMPLES} == set(serialize.CLASSES.values())


def test_every_dataclass_of_the_config_modules_is_known():
    for module in (config, data_config, run_config, schemes):
        for value in vars(module).values():
            if dataclasses.is_dataclass(value) and value.__module__ == module.__name__:
                assert serialize.CLASSES[value.__name__] is value


def test_text_is_readable_and_stable():
    text = serialize.to_json(schemes.Tiling(scheme=schemes.Fixed(), tile_size=20))
    assert json.loads(text) == {
        "class": "Tiling",
        "scheme": {"class": "Fixed", "fit": "stretch"},
        "tile_size": 20,
        "fit": None,
        "thumbnail": None,
        "single_tile_thumbnail": None,
        "pad_color": [0, 0, 0],
        "resample": "bicubic",
    }
    assert text.endswith("}\n") and '  "class": "Tiling"' in text


def plain(value=FULL):
    return serialize.to_plain(value)


def test_unknown_class():
    tree = plain()
    tree["data"]["tiling"]["scheme"]["class"] = "Relax"
    with pytest.raises(ValueError, match=r"config class 'Relax' is unknown; known: \['AvgPool'"):
        serialize.from_plain(tree)
    with pytest.raises(ValueError, match="config class None is unknown"):
        serialize.from_plain({"steps": 3})


def test_only_config_classes_are_built():
    with pytest.raises(ValueError, match="is unknown"):
        serialize.from_plain({"class": "Path", "args": ["x"]})


def test_unknown_and_missing_fields():
    tree = plain(config.MeshConfig())
    tree["fdsp"] = 2
    with pytest.raises(ValueError, match=r"class MeshConfig does not fit this version.*'fdsp'"):
        serialize.from_plain(tree)
    with pytest.raises(ValueError, match=r"class TrainConfig does not fit this version.*'steps'"):
        serialize.from_plain({"class": "TrainConfig"})


def test_bad_values_keep_their_message():
    tree = plain(config.MeshConfig())
    tree["fsdp"] = 0
    with pytest.raises(ValueError, match=r"MeshConfig.fsdp = 0: must be > 0"):
        serialize.from_plain(tree)


def test_what_is_no_config_is_refused():
    with pytest.raises(TypeError, match="cannot stand in a config"):
        serialize.to_plain({1, 2})


def test_load_run_config(tmp_path):
    (tmp_path / "config.json").write_text(serialize.to_json(FULL))
    assert serialize.load_run_config(tmp_path) == FULL
    assert serialize.load_run_config(tmp_path / "config.json") == FULL


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no such file; a run directory holds a config.json"),
        ("{", "config.json: "),
        ('{"class": "Plain"}', "holds a Plain, not a RunConfig"),
        ("3", "holds a int, not a RunConfig"),
        ('{"class": "RunConfig"}', "config.json: config of class RunConfig does not fit"),
        ('{"class": ["RunConfig"]}', "config.json: config class"),
    ],
)
def test_load_run_config_names_the_file(tmp_path, text, message):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        serialize.load_run_config(tmp_path)
    assert str(tmp_path) in str(caught.value)
