"""A tiny model through the whole export: lowered and quantised once, then run on LiteRT."""

import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from bluelm_jax import config, data_config, schemes, vlm
from bluelm_jax.layout import NEWLINE
from export import build, bundle, check, compare, flatbuffer, graphs, prompt, quantize
from export.config import ExportConfig, RunnerConfig, float_weights
from export.runner import Runner

EXPORT = ExportConfig(cache_size=128, prefill_chunk=16)
VARIANTS = {
    "float": float_weights(EXPORT),
    "int8": dataclasses.replace(EXPORT, decoder_precision="int8"),
    "int4": EXPORT,
    "int4 channelwise": dataclasses.replace(EXPORT, decoder_block_size=0, head_precision="int4"),
}
ONE_THREAD = RunnerConfig(num_threads=1)
DATA = data_config.DataConfig(
    sources=(data_config.SourceConfig(path="train.json"),),
    tiling=schemes.Tiling(scheme=schemes.Relaxed(), tile_size=20),
    seq_len=120, batch_size=1, tiles_per_group=9,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Exported:
    params: dict
    cfg: config.VLMConfig
    models: dict
    lowered: dict
    root: object

    def path(self, variant, model):
        return self.root / variant / f"{model}.tflite"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    p, cfg = check.tiny_model()
    cfg = dataclasses.replace(cfg, newline=True)
    p["newline"] = np.random.default_rng(9).normal(size=cfg.decoder.width).astype(np.float32)
    root = tmp_path_factory.mktemp("export")
    models = {model.name: model for model in graphs.build(p, cfg, EXPORT)}
    lowered = build.lower_all(p, cfg, EXPORT)
    info, _ = prompt.describe(DATA)
    for name, ex in VARIANTS.items():
        stop = prompt.stop_id(DATA)
        build.write_bundle(lowered, p, cfg, ex, root / name, prompt=info, stop_id=stop)
    return Exported(p, cfg, models, lowered, root)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", bundle.MODELS)
def test_every_signature_repeated_and_interleaved(exported, name, variant):
    model = exported.models[name]
    rules = quantize.rules(name, exported.cfg, VARIANTS[variant])
    weights = quantize.rounded_weights(model.weights, rules)
    rounded = any(rule[2] != "float" for rule in rules)
    bound = check.QUANTIZED_BOUND if rounded else check.FLOAT_BOUND
    errors = check.signature_errors(exported.path(variant, name), model, weights, 280)
    assert set(errors) == {signature.name for signature in model.signatures}
    assert max(errors.values()) <= bound, errors


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", bundle.MODELS)
def test_weights_appear_once(exported, name, variant):
    path = exported.path(variant, name)
    assert flatbuffer.duplicate_bytes(path) == 0
    weights = sum(w.nbytes for w in jax.tree.leaves(exported.models[name].weights))
    assert flatbuffer.constant_bytes(path) < weights * 1.1


def test_duplicates_are_noticed(exported, tmp_path):
    from ai_edge_litert.tools import flatbuffer_utils

    model = flatbuffer_utils.read_model(str(exported.path("float", "decoder")))
    big = max((b for b in model.buffers if b.data is not None), key=lambda b: len(b.data))
    next(b for b in model.buffers if b.data is not None and b is not big).data = big.data
    flatbuffer_utils.write_model(model, str(tmp_path / "twice.tflite"))
    assert flatbuffer.duplicate_bytes(tmp_path / "twice.tflite") == len(big.data)


def test_operations_fit_the_npu(exported):
    for name in check.NPU_MODELS:
        for report in flatbuffer.report(exported.path("int4", name)):
            assert report.npu_problems() == [], (name, report)
    (embedder, *_) = flatbuffer.report(exported.path("int4", "embedder"))
    assert embedder.npu_problems() == ["EMBEDDING_LOOKUP x1"]


def test_prefill_computes_nothing_after_the_last_keys(exported):
    reports = {r.name: r.ops for r in flatbuffer.report(exported.path("float", "decoder"))}
    depth = exported.cfg.decoder.depth
    assert reports["decode"]["FULLY_CONNECTED"] == 7 * depth + 1
    assert reports["prefill_16"]["FULLY_CONNECTED"] == 7 * (depth - 1) + 2
    assert "TRANSPOSE" not in reports["decode"]


def test_precisions_of_the_layers(exported):
    types = flatbuffer.weight_types(exported.path("int4", "decoder"))
    kinds = {"INT8" if "/head/" in name else "INT4" for name in types}
    assert kinds == {"INT8", "INT4"}
    for name, kind in types.items():
        assert kind == ("INT8" if "/head/" in name else "INT4"), name
    vit = flatbuffer.weight_types(exported.path("int4", "vit"))
    assert set(vit.values()) == {"INT8"} and len(vit) == 12
    assert set(flatbuffer.weight_types(exported.path("float", "decoder")).values()) == {"FLOAT32"}


def test_a_broken_signature_is_noticed(exported):
    from ai_edge_litert.tools import flatbuffer_utils

    data = exported.lowered["decoder"]
    flatbuffer.check_signatures(data, data)
    model = flatbuffer_utils.read_model_from_bytearray(bytearray(data))
    logits = next(o for o in model.signatureDefs[0].outputs if o.name == b"logits")
    logits.tensorIndex = 0
    broken = bytes(flatbuffer_utils.convert_object_to_bytearray(model))
    with pytest.raises(ValueError, match="decode/output/logits"):
        flatbuffer.check_signatures(broken, data)


@pytest.mark.parametrize(("views", "text"), [(9, 7), (5, 20), (0, 34), (4, 1), (0, 1)])
def test_runner_equals_generate(exported, views, text):
    runner = Runner(exported.root / "float", ONE_THREAD)
    question = check.random_prompt(exported.cfg, views, text, seed=views)
    want = check.jax_answer(exported.params, exported.cfg, question, new=8)
    for _ in range(2):  # an answer does not depend on the one before
        got = runner.generate(*question, max_new_tokens=8, stop_id=check.STOP)
        assert got.tokens == want
        assert got.stopped == (len(want) < 8)
    calls = {name: len(times) for name, times in runner.times.calls.items()}
    assert calls.get("vit", 0) == 2 * -(-views // 4)
    assert calls.get("prefill", 0) == 2 * -(-(text + 9 * views - 1) // 16)


@pytest.mark.parametrize("views", [0, 1, 4, 9])
def test_runner_encodes_tiles_in_batches(exported, views):
    tiles, _, _ = check.random_prompt(exported.cfg, views, 1)
    runner = Runner(exported.root / "float", ONE_THREAD)
    got = runner.encode(tiles)
    assert got.shape == (views * 9, exported.cfg.decoder.width)
    assert len(runner.times.calls["vit"]) == -(-views // 4)
    if views:
        want = vlm.encode_tiles(exported.params, jax.numpy.asarray(tiles), exported.cfg)
        np.testing.assert_allclose(got, want.reshape(got.shape), rtol=1e-4, atol=1e-4)


def test_runner_stops_and_places_newlines(exported):
    runner = Runner(exported.root / "float", ONE_THREAD)
    tiles, tokens, index = check.random_prompt(exported.cfg, 1, 6)
    index[0] = NEWLINE
    want = check.jax_answer(exported.params, exported.cfg, (tiles, tokens, index), new=4)
    got = runner.generate(tiles, tokens, index, max_new_tokens=4, stop_id=check.STOP)
    assert got.tokens == want
    stopped = runner.generate(tiles, tokens, index, max_new_tokens=4, stop_id=want[0])
    assert stopped.tokens == [] and stopped.stopped


def test_vision_can_be_freed_and_comes_back(exported):
    config_ = dataclasses.replace(ONE_THREAD, free_vision=True)
    runner = Runner(exported.root / "int4", config_)
    question = check.random_prompt(exported.cfg, 2, 5)
    first = runner.generate(*question, max_new_tokens=4)
    assert not set(runner._models) & set(bundle.VISION_MODELS)
    assert runner.generate(*question, max_new_tokens=4) == first
    assert len(runner.times.calls["load"]) == len(bundle.MODELS) + len(bundle.VISION_MODELS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": []}, r"tokens \[0\]"),
        ({"tokens": [999] * 13}, "token ids 999..999: must be in 0..279"),
        ({"image_index": [9] + [-1] * 12}, "image_index 9: must be < 1 views x 9 tokens"),
        ({"max_new_tokens": 116}, r"13 \+ 116 new tokens: must fit cache_size = 128"),
        ({"tiles": np.zeros((1, 21, 20, 3), np.uint8)}, r"must be uint8 \[V, 20, 20, 3\]"),
    ],
)
def test_runner_refuses(exported, change, message):
    runner = Runner(exported.root / "float", ONE_THREAD)
    tiles, tokens, index = check.random_prompt(exported.cfg, 1, 4)
    inputs = {"tiles": tiles, "tokens": tokens, "image_index": index, "max_new_tokens": 2} | change
    with pytest.raises(ValueError, match=message):
        runner.generate(**inputs)


def test_runner_needs_no_jax(exported):
    code = (
        "import sys, numpy as np; from export.runner import Runner; r = Runner(sys.argv[1]);"
        "a = r.generate(np.zeros((1, 20, 20, 3), np.uint8), np.array([5, 6]), np.array([0, -1]),"
        "max_new_tokens=3); print(len(a.tokens));"
        "print(sorted({'jax', 'tensorflow', 'flax', 'orbax'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(exported.root / "int4")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tokens, modules = done.stdout.split("\n")[:2]
    assert 0 <= int(tokens) <= 3 and modules == "[]"


def test_bundle_names_every_broken_file(exported, tmp_path):
    shutil.copytree(exported.root / "int4", tmp_path / "b")
    (tmp_path / "b" / "vit.tflite").unlink()
    data = bytearray((tmp_path / "b" / "decoder.tflite").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "b" / "decoder.tflite").write_bytes(data)
    with pytest.raises(bundle.BundleError) as error:
        bundle.load(tmp_path / "b")
    assert "vit.tflite: missing" in str(error.value)
    assert "decoder.tflite: checksum differs" in str(error.value)
    with pytest.raises(bundle.BundleError, match=r"vit\.tflite: missing$"):
        bundle.load(tmp_path / "b", verify=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"version": 99}, "this runner reads"), ({"shapes": {}}, "not a bundle manifest")],
)
def test_manifest_of_another_kind(exported, tmp_path, change, message):
    plain = json.loads((exported.root / "int4" / "manifest.json").read_text()) | change
    (tmp_path / "manifest.json").write_text(json.dumps(plain))
    with pytest.raises(bundle.BundleError, match=message):
        bundle.load(tmp_path)


def test_no_manifest_and_foreign_directories(exported, tmp_path):
    with pytest.raises(bundle.BundleError, match=r"manifest\.json: no such file"):
        bundle.load(tmp_path)
    (tmp_path / "thesis.txt").write_text("do not touch")
    with pytest.raises(bundle.BundleError, match=r"holds other files \(thesis.txt\)"):
        build.write_bundle(exported.lowered, exported.params, exported.cfg, EXPORT, tmp_path)


def test_prompt_from_image_and_question(exported, tmp_path):
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 256, (38, 20, 3)).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "page.png")
    manifest = bundle.load(exported.root / "int4")
    prompter = prompt.Prompter(exported.root / "int4", manifest)
    example = prompter.make("Read.", [tmp_path / "page.png"])
    assert example.num_views == 3  # two tiles and the thumbnail
    assert (example.image_index >= 0).sum() == 27
    assert prompter.tokenizer.decode(example.tokens).endswith("Read.[|AI|]:")
    two = prompter.make("<image> or <image>?", [tmp_path / "page.png"] * 2)
    assert (two.image_index >= 0).sum() == 54 and two.image_index.max() == 53
    runner = Runner(exported.root / "int4", ONE_THREAD)
    answer = runner.generate(example.tiles, example.tokens, example.image_index, max_new_tokens=3)
    assert len(answer.tokens) <= 3


def test_compare_counts_what_it_should(exported, tmp_path):
    tiles, tokens, index = check.random_prompt(exported.cfg, 3, 5)
    want = check.jax_answer(exported.params, exported.cfg, (tiles, tokens, index), new=4)
    unused = np.concatenate([np.full_like(tiles[:1], 255), tiles])  # view 0 is another sample's
    shifted = np.where(index >= 0, index + 9, index)
    arrays = {
        "tokens": np.stack([tokens, tokens]),
        "lengths": np.array([len(tokens)] * 2),
        "image_index": np.stack([shifted, shifted]),
        "tiles": unused[None],
        "references": np.array([" ".join(map(str, want)), "something else"]),
        "jax_tokens": np.array([want, [1, 1, 1, 1]]),
        "jax_lengths": np.array([len(want), 4]),
    }
    np.savez(tmp_path / "prompts.npz", **arrays)
    questions = compare.load_questions(tmp_path / "prompts.npz")
    assert compare.used_views(questions[0], 9).tiles.shape == tiles.shape
    result = compare.compare(
        {"float": exported.root / "float"},
        questions,
        config=ONE_THREAD,  # its own bound is 64 tokens; JAX stopped at 4
        decode=lambda ids: " ".join(map(str, ids)),
    )
    jax_row, float_row = result["rows"]
    assert (jax_row["exact_match"], jax_row["agreement"]) == (0.5, None)
    assert (float_row["exact_match"], float_row["agreement"]) == (0.5, 0.5)
    sizes = {file["name"]: file["bytes"] for file in result["files"]}
    assert sizes["float/decoder.tflite"] == exported.path("float", "decoder").stat().st_size
    assert {"vit", "prefill", "decode"} <= {time["stage"] for time in result["stages"]}
    assert all(time["ms"] > 0 for time in result["stages"])
    del arrays["references"]
    np.savez(tmp_path / "prompts.npz", **arrays)
    with pytest.raises(ValueError, match="holds no references"):
        compare.load_questions(tmp_path / "prompts.npz")


def test_check_reports_failures(monkeypatch, capsys):
    monkeypatch.setattr(check, "findings", lambda directory: [check.Finding("a", "1", False)])
    assert check.main() == 1
    assert "FAIL a" in capsys.readouterr().out


def test_gin_builds_the_export_config():
    from export import gin_setup as _registers  # noqa: F401
    from gin_configs import binding

    files = ["gin_configs/export/quickstart.gin"]
    found = binding.build(ExportConfig, files, ["ExportConfig.cache_size = 64"])
    assert found == ExportConfig(cache_size=64, prefill_chunk=32)
    for wrong, message in (
        ("ExportConfig.cache = 64", "ExportConfig has the fields cache_size"),
        ("RunnerConfig.num_threads = 64", "read by nothing: RunnerConfig.num_threads"),
        ("ExportConfig.cache_size = -1", "cache_size = -1: must be > 0"),
        ("sizes = 3", "read by nothing: %sizes"),
    ):
        with pytest.raises(binding.ConfigError, match=message):
            binding.build(ExportConfig, [], [wrong])
    with pytest.raises(binding.ConfigError, match=r"--gin_file=none\.gin: no such file"):
        binding.build(ExportConfig, ["none.gin"], [])
