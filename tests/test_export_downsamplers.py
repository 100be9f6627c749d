"""Every downsampler and projector through LiteRT: equal to the model, and fit for the NPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bluelm_jax import config, downsample, layout
from export import check, flatbuffer, lower, quantize, vision_graphs
from export.config import ExportConfig

ARMS = {
    "vila": config.VilaConcat(),
    "vila 3": config.VilaConcat(factor=3),
    "shuffle": config.PixelShuffle(),
    "pool": config.AvgPool(),
    "pool 3": config.AvgPool(factor=3),
    "resampler": config.Resampler(num_queries=6, head_dim=8),
    "identity": config.Identity(),
}
INTERNVL = config.ProjectorConfig(norm=True, activation="gelu_exact")
NONE = config.ProjectorConfig(depth=0)
MODELS = [(name, config.ProjectorConfig()) for name in ARMS]
MODELS += [("shuffle", INTERNVL), ("resampler", NONE)]
BATCH = 4


def make(name, projector):
    _, cfg = check.tiny_model()
    cfg = dataclasses.replace(cfg, downsampler=ARMS[name], projector=projector)
    p = jax.tree.map(jnp.asarray, check.random_weights(cfg))
    return p, cfg, vision_graphs.projector_model(p, cfg, BATCH)


def tokens(p, features, cfg):
    x = downsample.downsample(p.get("downsampler", {}), features, cfg)
    return downsample.project(p.get("projector", {}), x, cfg)


@pytest.mark.parametrize(("name", "projector"), MODELS)
def test_equal_to_the_model_on_litert(name, projector, tmp_path):
    p, cfg, model = make(name, projector)
    x = np.random.default_rng(0).normal(size=(BATCH, 25, 24)).astype(np.float32)
    want = tokens(p, jnp.asarray(x), cfg)
    count = layout.tokens_per_view(layout.token_side(cfg))
    assert want.shape == (BATCH, count, cfg.decoder.width)
    (tmp_path / "float.tflite").write_bytes(lower.to_tflite(model))
    loaded = check.LiteRTModel(tmp_path / "float.tflite", num_threads=1)
    for _ in range(2):
        got = loaded.run("projector", features=x)["image_tokens"]
        assert check.relative_error(got, want) <= check.FLOAT_BOUND
    assert flatbuffer.duplicate_bytes(tmp_path / "float.tflite") == 0
    (report,) = flatbuffer.report(tmp_path / "float.tflite")
    if projector is INTERNVL:  # The exact GELU: TFLite has no operator for the error function.
        assert report.npu_problems() != []
    else:
        assert report.npu_problems() == []


@pytest.mark.parametrize("name", ["pool", "resampler"])
def test_quantised(name, tmp_path):
    _, cfg, model = make(name, config.ProjectorConfig())
    rules = quantize.rules("projector", cfg, ExportConfig())
    path = tmp_path / "int8.tflite"
    path.write_bytes(quantize.quantize(lower.to_tflite(model), rules))
    weights = quantize.rounded_weights(model.weights, rules)
    errors = check.signature_errors(path, model, weights, cfg.decoder.vocab_size)
    assert max(errors.values()) <= check.QUANTIZED_BOUND
    assert set(flatbuffer.weight_types(path).values()) == {"INT8"}
