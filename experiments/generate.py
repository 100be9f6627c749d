"""Answers questions about images with a trained or imported run.

    python -m experiments.generate --run=runs/quickstart/relaxed --image=page.png --prompt="Read."
    python -m experiments.generate --run=runs/smollm2 --chat --temperature=0.7 --top_p=0.9

Text is printed as it is generated. `<image>` in a question marks an image's place; images without a
mark come first. With --chat, or without --prompt, questions are read line by line from the terminal or
a pipe; later ones continue the conversation, and only what is new is read (docs/generation.md).
Sampling is greedy unless --temperature is above 0; every field of SamplingConfig is a gin binding too.
"""

from __future__ import annotations

import dataclasses

from absl import flags

from bluelm_jax import chat, serialize
from bluelm_jax.sampling import SamplingConfig
from experiments import cli, dialogue, gin_setup
from gin_configs import command

RUN = flags.DEFINE_string("run", None, "Directory of the run.", required=True)
flags.DEFINE_alias("workdir", "run")
IMAGE = flags.DEFINE_multi_string("image", [], "Image file; may be repeated.")
PROMPT = flags.DEFINE_string("prompt", None, "The question; without it, a dialogue.")
CHAT = flags.DEFINE_bool("chat", False, "A dialogue; --prompt is then its first question.")
SEED = flags.DEFINE_integer("seed", 0, "Seed of sampling, where temperature > 0.", lower_bound=0)
MAX_NEW = flags.DEFINE_integer("max_new_tokens", None, "SamplingConfig.max_new_tokens.")
TEMPERATURE = flags.DEFINE_float("temperature", None, "SamplingConfig.temperature; 0 is greedy.")
TOP_K = flags.DEFINE_integer("top_k", None, "SamplingConfig.top_k; 0 keeps all.")
TOP_P = flags.DEFINE_float("top_p", None, "SamplingConfig.top_p.")
PENALTY = flags.DEFINE_float("repetition_penalty", None, "SamplingConfig.repetition_penalty.")
flags.adopt_module_key_flags(command)


def sampling_config() -> SamplingConfig:
    """SamplingConfig of gin, with the flags that were given on top."""
    given = {
        flag.name: flag.value for flag in (MAX_NEW, TEMPERATURE, TOP_K, TOP_P, PENALTY)
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(command.build(SamplingConfig), **given)


def main() -> None:
    """One answer, or a dialogue."""
    how = sampling_config()
    if command.DRY_RUN.value:
        print(gin_setup.describe(how))
        print(cli.model_summary(serialize.load_run_config(RUN.value).model))
        return
    model = dialogue.load(RUN.value)
    if CHAT.value or PROMPT.value is None:
        dialogue.dialogue(model, how, SEED.value, PROMPT.value, IMAGE.value)
        return
    model.check_images(IMAGE.value)
    dialogue.show(
        model.ask(chat.Conversation(), PROMPT.value, IMAGE.value, sampling=how, seed=SEED.value)
    )


if __name__ == "__main__":
    command.run(main)
