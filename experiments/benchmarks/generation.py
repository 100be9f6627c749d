"""Tokens a second of greedy generation, beside transformers' `generate` with the same weights.

    pip install -r requirements.txt torch==2.13.0 transformers
    python -m experiments.benchmarks.generation

Both run the shape of SmolLM2-135M (30 blocks of width 576, vocabulary 49,152, tied head) with the same
random float32 weights in this process, on as many threads as there are cores: 128 prompt tokens and
128 new ones, for 1 row and for 8. The two take turns; a round's ratio is of neighbours in time, and the
table gives medians. On a machine that does other work too, set OMP_WAIT_POLICY=PASSIVE: OpenMP's
spinning barriers stall PyTorch when another process holds a core. The table counts the
greedy tokens that are equal. The last column but one is
this library without the layout of `decoding.prepare`.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from bluelm_jax import config, decoder, decoding, generate, params, presets
from bluelm_jax.params import Tree
from bluelm_jax.weights import convert

BATCHES = flags.DEFINE_list("batches", ["1", "8"], "Rows generated together.")
PROMPT = flags.DEFINE_integer("prompt", 128, "Prompt tokens.", lower_bound=1)
NEW = flags.DEFINE_integer("new", 128, "New tokens.", lower_bound=2)
ROUNDS = flags.DEFINE_integer("rounds", 5, "Rounds of each batch size.", lower_bound=1)
DEPTH = flags.DEFINE_integer("depth", 30, "Blocks; fewer for a quick look.", lower_bound=1)
NO_STOP = ()


def reference(weights: Tree, cfg: config.DecoderConfig) -> Any:
    """transformers' model with these weights, on all cores."""
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import LlamaConfig, LlamaForCausalLM  # pyright: ignore[reportMissingImports]

    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=cfg.vocab_size, hidden_size=cfg.width, intermediate_size=cfg.mlp_dim,
            num_hidden_layers=cfg.depth, num_attention_heads=cfg.num_heads,
            num_key_value_heads=cfg.num_kv_heads, head_dim=cfg.head_dim,
            max_position_embeddings=cfg.max_length, rms_norm_eps=cfg.norm_eps,
            rope_theta=cfg.rope_theta, tie_word_embeddings=True,
        )
    ).eval()  # fmt: skip
    named = convert.decoder_tensors(weights, cfg)
    state = {name: torch.from_numpy(np.array(value)) for name, value in named.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    model.tie_weights()
    return model


def theirs(model: Any, tokens: np.ndarray) -> Callable[[], np.ndarray]:
    """A greedy run of transformers."""
    import torch  # pyright: ignore[reportMissingImports]

    prompt = torch.from_numpy(tokens.astype(np.int64))

    def run() -> np.ndarray:
        with torch.inference_mode():
            out = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0,
                max_new_tokens=NEW.value, min_new_tokens=NEW.value, eos_token_id=None,
            )  # fmt: skip
        return out[:, tokens.shape[1] :].numpy()

    return run


def ours(p: Tree, cfg: config.DecoderConfig, tokens: np.ndarray) -> Callable[[], np.ndarray]:
    """A greedy run of this library, from prompt to tokens."""
    model = config.VLMConfig(
        vision=config.VisionConfig(tile_size=28, width=16, depth=1, num_heads=1), decoder=cfg
    )
    rows, length = tokens.shape
    prompts = generate.Prompts(
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.full(rows, length, jnp.int32),
        image_index=jnp.full(tokens.shape, -1, jnp.int32),
        tiles=jnp.zeros((1, 0, 28, 28, 3), jnp.uint8),
    )
    how = generate.SamplingConfig(max_new_tokens=NEW.value)
    weights, key = {"decoder": p}, jax.random.key(0)

    def run() -> np.ndarray:
        out = generate.generate(weights, prompts, key, cfg=model, sampling=how, stop=NO_STOP)
        return np.asarray(out.tokens)

    return run


def timed(run: Callable[[], np.ndarray]) -> tuple[float, np.ndarray]:
    """Seconds of a run, and its tokens."""
    start = time.perf_counter()
    tokens = run()
    return time.perf_counter() - start, tokens


@dataclasses.dataclass(frozen=True)
class Row:
    """Median tokens a second, and the median over rounds of the ratio."""

    batch: int
    ours: float
    plain: float
    theirs: float
    ratio: float
    equal: int

    def __str__(self) -> str:
        new = self.batch * NEW.value
        return (
            f"{self.batch:>5}  {self.ours:>8.1f}  {self.theirs:>12.1f}  {self.ratio:>5.2f}  "
            f"{self.plain:>13.1f}  {self.equal} of {new}"
        )


def compare(p: Tree, model: Any, cfg: config.DecoderConfig, batch: int) -> Row:
    """Rounds of transformers, this library, and this library with the weights as they are stored."""
    tokens = np.random.default_rng(batch).integers(3, cfg.vocab_size, (batch, PROMPT.value))
    prepared = jax.block_until_ready(decoding.prepare(p, cfg, rows=batch, dtype=jnp.float32))
    runs = [theirs(model, tokens), ours(prepared, cfg, tokens), ours(p, cfg, tokens)]
    want, got, plain = (run() for run in runs)  # Compiles, and warms the caches of both.
    assert (got == plain).all(), "the prepared weights chose other tokens than the stored ones"
    rounds = [[timed(run)[0] for run in runs] for _ in range(ROUNDS.value)]
    speeds = [batch * NEW.value / statistics.median(times) for times in zip(*rounds, strict=True)]
    ratio = statistics.median(seconds[0] / seconds[1] for seconds in rounds)
    return Row(batch, speeds[1], speeds[2], speeds[0], ratio, int((want == got).sum()))


def main(_: list[str]) -> None:
    """Prints the table."""
    cfg = dataclasses.replace(presets.smollm2_135m(), depth=DEPTH.value)
    p = params.init(decoder.specs(cfg), jax.random.key(0))
    model = reference(p, cfg)
    size = params.count(decoder.specs(cfg)) * 4 / 1e9
    print(f"{size:.2f} GB of float32; {PROMPT.value} + {NEW.value} tokens, {ROUNDS.value} rounds")
    print(" rows  tokens/s  transformers  ratio  not prepared  equal tokens", flush=True)
    for batch in BATCHES.value:
        print(compare(p, model, cfg, int(batch)), flush=True)


if __name__ == "__main__":
    app.run(main)
