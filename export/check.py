"""Lowers, quantises and runs a tiny random model on LiteRT and holds it against JAX.

    python -m export.check

Checks, and prints a table of: the error of every signature over repeated and interleaved calls, in
float, INT8 and INT4; operations and ranks that MediaTek's compiler plugin would refuse; weights
that stand twice in a file; and, for the whole float model, equality with `generate` token for
token. Exits with status 1 if anything fails. Takes about a minute on two cores.

A quantised signature is held against the JAX graph with its weights rounded to the same grid, so
what is left is the rounding of activations inside the kernels, and a wrong scale, layer or block
shows. The error against float weights is printed beside it; of random weights it means little.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bluelm_jax import config, generate, layout, params, presets, vlm
from bluelm_jax.params import Tree
from export import build, bundle, flatbuffer, graphs, quantize
from export.config import ExportConfig, RunnerConfig, float_weights
from export.runner import LiteRTModel, Runner
from export.signatures import Model, Signature

# Root-mean-square error relative to the output's own root mean square. Kernels round activations to
# 8 bits a row, about 0.5 % of the values' spread in each of the seven layers of two blocks.
FLOAT_BOUND, QUANTIZED_BOUND = 1e-5, 0.03
NPU_MODELS = ("vit", "projector", "decoder")  # the others run on the CPU by design
CALLS = 3
STOP = 2


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the table."""

    name: str
    value: str
    ok: bool


def random_weights(cfg: config.VLMConfig, seed: int = 0) -> Tree:
    """Weights of the initial scale, none of them constant: ones and zeros are optimised away."""
    rng = np.random.default_rng(seed)

    def one(p: params.Param) -> np.ndarray:
        noise = rng.normal(size=p.shape).astype(np.float32)
        if p.scale in ("zeros", "ones"):
            return float(p.scale == "ones") + 0.1 * noise
        return np.float32(p.std()) * noise

    return params.map_params(one, vlm.specs(cfg))


def tiny_model(seed: int = 0, **decoder_overrides) -> tuple[Tree, config.VLMConfig]:
    """The tiny preset with `random_weights`."""
    cfg = presets.tiny(**decoder_overrides)
    return jax.tree.map(jnp.asarray, random_weights(cfg, seed)), cfg


def random_inputs(
    signature: Signature, vocab_size: int, rng: np.random.Generator
) -> dict[str, np.ndarray]:
    """Inputs of the signature's shapes and types; masks hide about half."""
    inputs = {}
    for name, struct in signature.inputs.items():
        if struct.dtype == jnp.uint8:
            inputs[name] = rng.integers(0, 256, struct.shape).astype(np.uint8)
        elif struct.dtype == jnp.int32:
            inputs[name] = rng.integers(0, vocab_size, struct.shape).astype(np.int32)
        elif name == "mask":
            inputs[name] = -100.0 * rng.integers(0, 2, struct.shape).astype(np.float32)
        else:
            inputs[name] = rng.normal(size=struct.shape).astype(np.float32)
    return inputs


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Root-mean-square error over the root mean square of `want`."""
    want = np.asarray(want)
    if got.shape != want.shape or not np.isfinite(got).all():
        return float("inf")
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def signature_errors(path: Path, model: Model, weights: Tree, vocab_size: int) -> dict[str, float]:
    """Largest error of each signature against JAX with `weights`.

    Every signature is called CALLS times, in turn with the others.
    """
    loaded, rng = LiteRTModel(path, num_threads=1), np.random.default_rng(0)
    reference = {signature.name: jax.jit(signature.fn) for signature in model.signatures}
    errors = dict.fromkeys(reference, 0.0)
    for _ in range(CALLS):
        for signature in model.signatures:
            inputs = random_inputs(signature, vocab_size, rng)
            want = reference[signature.name](weights, **inputs)
            got = loaded.run(signature.name, **inputs)
            worst = max(relative_error(got[name], want[name]) for name in want)
            errors[signature.name] = max(errors[signature.name], worst)
    return errors


def random_prompt(
    cfg: config.VLMConfig, views: int, text: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tiles, tokens, image_index) of a prompt with `text` ids around the views' tokens."""
    rng, side = np.random.default_rng(seed), cfg.vision.tile_size
    count = views * layout.tokens_per_view(layout.token_side(cfg))
    tiles = rng.integers(0, 256, (views, side, side, 3)).astype(np.uint8)
    tokens = rng.integers(STOP + 1, cfg.decoder.vocab_size, text + count).astype(np.int32)
    index = np.full(text + count, -1, np.int32)
    index[text // 2 : text // 2 + count] = np.arange(count)
    return tiles, tokens, index


def jax_answer(
    p: Tree, cfg: config.VLMConfig, prompt: tuple[np.ndarray, ...], new: int
) -> list[int]:
    """Greedy tokens of `generate.generate` for one prompt."""
    tiles, tokens, index = prompt
    side = cfg.vision.tile_size
    filled = tiles if len(tiles) else np.zeros((1, side, side, 3), np.uint8)
    prompts = generate.Prompts(
        tokens=jnp.asarray(tokens)[None],
        lengths=jnp.asarray([len(tokens)], jnp.int32),
        image_index=jnp.asarray(index)[None],
        tiles=jnp.asarray(filled)[None],
    )
    sampling = generate.SamplingConfig(max_new_tokens=new)
    key = jax.random.key(0)  # greedy: unused
    out = generate.generate(p, prompts, key, cfg=cfg, sampling=sampling, stop=STOP)
    return np.asarray(out.tokens[0])[: int(out.lengths[0])].tolist()


def _error_findings(path: Path, variant: str, cfg, model: Model, ex: ExportConfig) -> Iterator:
    rules = quantize.rules(model.name, cfg, ex)
    rounded = quantize.rounded_weights(model.weights, rules)
    vocab = cfg.decoder.vocab_size
    errors = signature_errors(path, model, rounded, vocab)
    changed = any(precision != "float" for _, _, precision, _ in rules)
    beside = signature_errors(path, model, model.weights, vocab) if changed else {}
    bound = QUANTIZED_BOUND if changed else FLOAT_BOUND
    for name, error in errors.items():
        text = f"{error:.1e} (bound {bound:.0e})"
        text += f", against float weights {beside[name]:.1e}" if beside else ""
        yield Finding(f"{variant:<6}{model.name}/{name} error", text, error <= bound)


def _file_findings(path: Path, variant: str, model: Model) -> Iterator:
    twice = flatbuffer.duplicate_bytes(path)
    size = flatbuffer.constant_bytes(path)
    label = f"{variant:<6}{model.name} constants"
    yield Finding(label, f"{size:,} bytes, {twice} of them twice", twice == 0)
    for report in flatbuffer.report(path) if model.name in NPU_MODELS else ():
        problems = report.npu_problems()
        label = f"{variant:<6}{model.name}/{report.name} NPU operations"
        text = ", ".join(problems) or f"all {sum(report.ops.values())} of known kinds"
        yield Finding(label, text, not problems)


def _answer_finding(directory: Path, p: Tree, cfg: config.VLMConfig) -> Finding:
    prompt = random_prompt(cfg, views=9, text=7)
    runner = Runner(directory, RunnerConfig(num_threads=1))
    got = runner.generate(*prompt, max_new_tokens=12, stop_id=STOP).tokens
    want = jax_answer(p, cfg, prompt, new=12)
    return Finding("float answer, 9 views", f"{got[:4]}... JAX {want[:4]}...", got == want)


def findings(directory: Path) -> Iterator[Finding]:
    """Runs every check, writing bundles under `directory`."""
    p, cfg = tiny_model()
    int4 = ExportConfig(cache_size=128, prefill_chunk=16)
    int8 = dataclasses.replace(int4, decoder_precision="int8")
    models = graphs.build(p, cfg, int4)
    lowered = build.lower_all(p, cfg, int4)
    for variant, ex in {"float": float_weights(int4), "int8": int8, "int4": int4}.items():
        build.write_bundle(lowered, p, cfg, ex, directory / variant)
        for model in models:
            path = directory / variant / f"{model.name}.tflite"
            yield from _error_findings(path, variant, cfg, model, ex)
            yield from _file_findings(path, variant, model)
    yield _answer_finding(directory / "float", p, cfg)
    (directory / "int4" / "vit.tflite").write_bytes(b"damaged")
    try:
        bundle.load(directory / "int4")
        yield Finding("damaged file is refused", "it was accepted", False)
    except bundle.BundleError as error:
        yield Finding("damaged file is refused", str(error).rsplit(": ", 1)[-1], True)


def main() -> int:
    """Prints the table; returns the number of failures."""
    failures = 0
    with tempfile.TemporaryDirectory() as directory:
        for found in findings(Path(directory)):
            print(f"{'ok' if found.ok else 'FAIL':<5}{found.name:<46}{found.value}", flush=True)
            failures += not found.ok
    print(f"{failures} failed" if failures else "export: all checks passed")
    return failures


if __name__ == "__main__":
    sys.exit(1 if main() else 0)
