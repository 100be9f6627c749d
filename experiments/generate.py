"""Answers a question about images with a trained run.

    python -m experiments.generate --run=runs/quickstart/relaxed --image=page.png --prompt="Read."

`<image>` in the prompt marks an image's place; images without a mark come first. Without --prompt it
reads questions line by line from the terminal: `/image PATH` adds an image to the next question,
`/quit` ends.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import jax
import numpy as np
from absl import flags

from bluelm_jax import generate, serialize
from bluelm_jax.data import batching, conversation
from bluelm_jax.data import tokenizer as tokenizers
from bluelm_jax.data.examples import Example, ExampleMaker
from bluelm_jax.data.plans import Planner
from bluelm_jax.data_config import SourceConfig
from bluelm_jax.generate import SamplingConfig
from bluelm_jax.params import Tree
from bluelm_jax.run_config import RunConfig
from experiments import cli, evaluation, gin_setup
from gin_configs import command

RUN = flags.DEFINE_string("run", None, "Directory of the trained run.", required=True)
flags.DEFINE_alias("workdir", "run")
IMAGE = flags.DEFINE_multi_string("image", [], "Image file; may be repeated.")
PROMPT = flags.DEFINE_string("prompt", None, "The question; without it, a dialogue.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of sampling, where temperature > 0.")
flags.adopt_module_key_flags(command)
# Prompts are padded to a multiple of this, so that questions of similar length share a compilation.
BUCKET = 64


def make_prompt(run: RunConfig, prompt: str, images: list[str]) -> Example:
    """The prompt of one question.

    Raises:
      ValueError: an unreadable image, or a prompt longer than the model takes.
    """
    data = dataclasses.replace(
        run.data, seq_len=run.model.decoder.max_length, tiles_per_group=2**20,
        on_unreadable_image="raise", on_invalid_record="raise", on_overlong="raise",
    )  # fmt: skip
    text = conversation.mark_images(prompt, len(images))
    record = {
        "id": "question",
        "image": [str(Path(path).absolute().relative_to("/")) for path in images],
        "conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": ""}],
    }
    maker = ExampleMaker(Planner(data, side=run.token_side))
    made = maker.make_prompt(record, SourceConfig(path="question", image_root="/"), "question")
    if not isinstance(made, Example):
        raise ValueError(str(made))
    return made


def answer(weights: Tree, run: RunConfig, example: Example, cfg: SamplingConfig, seed: int) -> str:
    """The generated text of one prompt."""
    room = run.model.decoder.max_length - cfg.max_new_tokens
    if example.length > room:
        raise ValueError(
            f"the prompt takes {example.length} positions; max_length = "
            f"{run.model.decoder.max_length} leaves {room} before {cfg.max_new_tokens} new tokens"
        )
    tokenizer = tokenizers.load(run.data.tokenizer)
    shape = batching.BatchShape(
        batch_size=1, seq_len=min(-(-example.length // BUCKET) * BUCKET, room), tile_groups=1,
        tiles_per_group=example.num_views, tile_size=run.model.vision.tile_size,
        tokens_per_view=run.token_side**2, pad_id=tokenizer.pad_id,
    )  # fmt: skip
    arrays = batching.batch_prompts([example], shape)
    prompts = evaluation.to_prompts(arrays)
    out = generate.generate(
        weights, prompts, jax.random.key(seed), cfg=run.model, sampling=cfg,
        stop=evaluation.stop_token(run),
    )  # fmt: skip
    return tokenizer.decode(np.asarray(out.tokens)[0, : int(out.lengths[0])].tolist())


def dialogue(weights: Tree, run: RunConfig, cfg: SamplingConfig) -> None:
    """Questions from standard input, one a line, each on its own."""
    images: list[str] = []
    for line in sys.stdin:
        line = line.strip()
        if line == "/quit":
            return
        if line.startswith("/image "):
            images.append(line.removeprefix("/image ").strip())
            continue
        try:
            print(answer(weights, run, make_prompt(run, line, images), cfg, SEED.value), flush=True)
        except command.USER_ERRORS as e:
            print(f"error: {e}", file=sys.stderr)
        images = []


def main() -> None:
    """One answer, or a dialogue."""
    cfg = command.build(SamplingConfig)
    run = serialize.load_run_config(RUN.value)
    if command.DRY_RUN.value:
        print(gin_setup.describe(cfg))
        print(cli.model_summary(run.model))
        return
    weights = cli.load_weights(RUN.value, run.model)
    if PROMPT.value is None:
        dialogue(weights, run, cfg)
        return
    print(answer(weights, run, make_prompt(run, PROMPT.value, IMAGE.value), cfg, SEED.value))


if __name__ == "__main__":
    command.run(main)
