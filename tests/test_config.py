"""Bounds of the config classes and the sizes of the presets."""

import dataclasses

import pytest
from model_helpers import TINY, make_run, replace

from bluelm_jax import config, run_config, schemes


def make(cls, **fields):
    """`cls` with the tiny model's values, or the defaults, for what is not given."""
    bases = {
        config.VisionConfig: TINY.vision,
        config.DecoderConfig: TINY.decoder,
        config.VLMConfig: TINY,
        config.TrainConfig: config.TrainConfig(steps=100),
    }
    return dataclasses.replace(bases[cls], **fields) if cls in bases else cls(**fields)


@pytest.mark.parametrize(
    ("cls", "field", "value", "bound"),
    [
        (config.VisionConfig, "patch_size", 0, "> 0"),
        (config.VisionConfig, "width", -24, "> 0"),
        (config.VisionConfig, "norm_eps", 0.0, "> 0"),
        (config.VisionConfig, "tile_size", 3, ">= 4"),
        (config.VisionConfig, "num_heads", 5, "a divisor of 24"),
        (config.VisionConfig, "feature", "first", "'last' or 'penultimate'"),
        (config.VisionConfig, "unroll", 3, "in 1..2"),
        (config.VisionConfig, "unroll", 0, "in 1..2"),
        (config.VilaConcat, "factor", 0, "> 0"),
        (config.VisionConfig, "activation", "relu", "one of ('gelu', 'gelu_exact', 'silu')"),
        (config.PixelShuffle, "factor", 0, "> 0"),
        (config.AvgPool, "factor", -1, "> 0"),
        (config.Resampler, "num_queries", 0, "> 0"),
        (config.Resampler, "head_dim", 0, "> 0"),
        (config.ProjectorConfig, "depth", -1, ">= 0"),
        (config.ProjectorConfig, "activation", "relu", "one of ('gelu', 'gelu_exact', 'silu')"),
        (config.ProjectorConfig, "norm_eps", 0.0, "> 0"),
        (config.VLMConfig, "downsampler", config.Resampler(head_dim=12),
         "of a head_dim that divides decoder.width = 32, itself a multiple of 4"),
        (config.VLMConfig, "projector", config.ProjectorConfig(depth=0),
         "of depth >= 1: tokens of width 24 enter a decoder of width 32"),
        (config.DecoderConfig, "vocab_size", 0, "> 0"),
        (config.DecoderConfig, "max_length", 0, "> 0"),
        (config.DecoderConfig, "head_dim", 7, "even and > 0"),
        (config.DecoderConfig, "head_dim", 0, "even and > 0"),
        (config.DecoderConfig, "num_kv_heads", 3, "a divisor of num_heads = 4"),
        (config.DecoderConfig, "num_kv_heads", 0, "> 0"),
        (config.DecoderConfig, "logit_divisor", 0.0, "> 0"),
        (config.DecoderConfig, "unroll", 3, "in 1..2"),
        (config.VLMConfig, "dtype", "float16", "'float32' or 'bfloat16'"),
        (config.OptimConfig, "peak_lr", 0.0, "> 0"),
        (config.OptimConfig, "peak_lr", float("nan"), "> 0"),
        (config.OptimConfig, "warmup_steps", -1, ">= 0"),
        (config.OptimConfig, "final_lr_ratio", 1.5, "in 0..1"),
        (config.OptimConfig, "b1", 1.0, "in [0, 1)"),
        (config.OptimConfig, "b2", -0.1, "in [0, 1)"),
        (config.OptimConfig, "weight_decay", -0.1, ">= 0"),
        (config.OptimConfig, "clip_norm", 0.0, "None or > 0"),
        (config.OptimConfig, "vision_layer_decay", 0.0, "in (0, 1]"),
        (config.OptimConfig, "vision_layer_decay", 1.1, "in (0, 1]"),
        (config.MeshConfig, "data", 0, "-1 or > 0"),
        (config.MeshConfig, "fsdp", 0, "> 0"),
        (config.MeshConfig, "tensor", -1, "> 0"),
        (config.TrainConfig, "steps", 0, "> 0"),
        (config.TrainConfig, "accumulation", 0, "> 0"),
        (config.TrainConfig, "save_every", 0, "> 0"),
        (config.TrainConfig, "keep_checkpoints", 0, "> 0"),
        (config.TrainConfig, "logits_chunk", -1, ">= 0"),
        (config.TrainConfig, "trainable", (), "a non-empty choice of"),
        (config.TrainConfig, "trainable", ("decoder", "head"), "a non-empty choice of"),
        (config.TrainConfig, "init_parts", ("vision",), "None or, with init_from, a choice of"),
    ],
)  # fmt: skip
def test_bounds_name_class_field_value_and_bound(cls, field, value, bound):
    with pytest.raises(ValueError) as caught:
        make(cls, **{field: value})
    assert str(caught.value).startswith(f"{cls.__name__}.{field} = {value!r}: must be {bound}")


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (config.VisionConfig, "tile_size", 4),
        (config.VisionConfig, "unroll", 2),
        (config.DecoderConfig, "num_kv_heads", 4),
        (config.OptimConfig, "clip_norm", None),
        (config.OptimConfig, "final_lr_ratio", 1.0),
        (config.OptimConfig, "warmup_steps", 0),
        (config.MeshConfig, "data", -1),
        (config.TrainConfig, "trainable", ("newline",)),
    ],
)
def test_values_on_the_bound_are_taken(cls, field, value):
    assert getattr(make(cls, **{field: value}), field) == value


def test_penultimate_features_need_no_last_block():
    with pytest.raises(ValueError, match="depth = 1: must be >= 2 with feature = 'penultimate'"):
        make(config.VisionConfig, depth=1, feature="penultimate")
    with pytest.raises(ValueError, match=r"VisionConfig.unroll = 2: must be in 1\.\.1"):
        make(config.VisionConfig, feature="penultimate", unroll=2)
    assert make(config.VisionConfig, feature="penultimate").num_blocks == 1
    assert TINY.vision.num_blocks == 2


def test_width_of_the_tokens_that_the_projector_reads():
    widths = {
        config.VilaConcat(): 24, config.PixelShuffle(factor=3): 216, config.AvgPool(): 24,
        config.Resampler(head_dim=8): 32, config.Identity(): 24,
    }  # fmt: skip
    for downsampler, width in widths.items():
        assert make(config.VLMConfig, downsampler=downsampler).token_width == width
    last = config.ProjectorConfig(depth=0)
    assert make(config.VLMConfig, downsampler=config.Resampler(head_dim=8), projector=last)


def test_configs_are_frozen_and_hashable():
    run = make_run()
    assert hash(run) == hash(make_run()) and run == make_run()
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.train.steps = 3


def test_patches_along_a_side_are_whole():
    assert config.VisionConfig().side == 27  # 384 / 14 = 27.4
    assert TINY.vision.side == 5


# Cross-checks of a whole run.


@pytest.mark.parametrize(
    ("part", "fields", "message"),
    [
        ("data", {"tiling": schemes.Tiling(scheme=schemes.Fixed(), tile_size=24)},
         "data.tiling.tile_size = 24 but model.vision.tile_size = 20"),
        ("data", {"seq_len": 513}, "data.seq_len = 513 exceeds model.decoder.max_length = 512"),
        ("data", {"layout": schemes.UnpadNewline()}, "needs model.newline = True"),
        ("train", {"accumulation": 3},
         "data.batch_size = 4 is not a multiple of train.accumulation = 3"),
        ("train", {"accumulation": 2},
         "data.tile_groups = 1 is not a multiple of train.accumulation = 2"),
    ],
)  # fmt: skip
def test_parts_that_disagree(part, fields, message):
    with pytest.raises(ValueError, match=message):
        replace(make_run(), part, **fields)


def test_parts_that_agree():
    run = replace(make_run(), "model", newline=True)
    run = replace(run, "data", layout=schemes.UnpadNewline(), seq_len=512, tile_groups=2)
    run = replace(run, "train", accumulation=2)
    assert isinstance(run, run_config.RunConfig) and run.token_side == 3


def test_warm_up_must_end_before_the_run():
    optim = config.OptimConfig(warmup_steps=6)
    with pytest.raises(
        ValueError, match=r"TrainConfig.steps = 6: must be > optim.warmup_steps = 6"
    ):
        config.TrainConfig(steps=6, optim=optim)
    assert config.TrainConfig(steps=7, optim=optim).steps == 7
