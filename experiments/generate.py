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
import sys
from collections.abc import Iterator, Sequence

from absl import flags

from bluelm_jax import chat, run_folder, serialize
from bluelm_jax.sampling import SamplingConfig
from experiments import cli, gin_setup
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

HELP = """\
/image PATH   adds an image to the next question; repeat it for several
/images       lists the images that wait
/history      shows the conversation so far
/reset        forgets the conversation and waiting images
/help         this text
/quit         ends
A line that starts with // is a question that starts with /"""


def sampling_config() -> SamplingConfig:
    """SamplingConfig of gin, with the flags that were given on top."""
    given = {
        flag.name: flag.value for flag in (MAX_NEW, TEMPERATURE, TOP_K, TOP_P, PENALTY)
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(command.build(SamplingConfig), **given)


class Dialogue:
    """A conversation from lines; `handle` does what one line asks for."""

    def __init__(self, model: chat.Chat, how: SamplingConfig, seed: int):
        self._model, self._how, self._seed = model, how, seed
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self._past = chat.Conversation()
        self._images: list[str] = []
        self._history: list[tuple[str, str]] = []

    def handle(self, line: str) -> bool:
        """Does what a line says; False ends the dialogue."""
        word, _, rest = line.partition(" ")
        if line.startswith("//"):
            self.ask(line[1:])
        elif not line.startswith("/"):
            self.ask(line)
        elif word in ("/quit", "/exit"):
            return False
        elif word == "/image":
            self.add_image(rest.strip())
        else:
            self._command(word)
        return True

    def _command(self, word: str) -> None:
        if word == "/reset":
            self.reset()
        elif word == "/help":
            print(HELP, flush=True)
        elif word == "/images":
            print("\n".join(self._images) or "no images wait", flush=True)
        elif word == "/history":
            for question, answer in self._history:
                print(f"> {question}\n{answer}", flush=True)
        else:
            raise ValueError(f"unknown command {word}; /help lists them")

    def add_image(self, path: str) -> None:
        """Puts an image before the next question; a bad header is found now, not then."""
        if not path:
            raise ValueError("/image needs a path")
        self._model.check_images([path])
        self._images.append(path)

    def ask(self, question: str) -> None:
        """Prints the answer to a question; the waiting images go with it."""
        images, self._images = self._images, []
        answer = self._model.ask(self._past, question, images, sampling=self._how, seed=self._seed)
        show(answer)
        self._past = answer.conversation
        marks = "".join(f"[{path}] " for path in images)
        self._history.append((marks + question, answer.text))


def show(answer: chat.Answer) -> None:
    """Prints an answer as it comes."""
    for piece in answer:
        print(piece, end="", flush=True)
    print(flush=True)


def lines() -> Iterator[str]:
    """Lines of standard input without white space at the ends, empty ones left out.

    A terminal gets a prompt to type at; a pipe does not.
    """
    typing = sys.stdin.isatty()
    if typing:
        print("Questions, or /help.", file=sys.stderr)
    while True:
        if typing:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()


def dialogue(
    model: chat.Chat, how: SamplingConfig, first: str | None, images: Sequence[str]
) -> None:
    """Questions from standard input, one a line; a mistake is named and does not end it."""
    talk = Dialogue(model, how, SEED.value)
    opening = [f"/image {path}" for path in images]
    if first is not None:
        opening.append("/" + first if first.startswith("/") else first)
    for line in opening:
        talk.handle(line)
    for line in lines():
        try:
            if not talk.handle(line):
                return
        except command.USER_ERRORS as e:
            print(f"error: {e}", file=sys.stderr, flush=True)


def load(directory: str) -> chat.Chat:
    """The model of a run directory; ValueError names what is missing."""
    run, weights = run_folder.load(directory)
    return chat.Chat(weights, run)


def main() -> None:
    """One answer, or a dialogue."""
    how = sampling_config()
    if command.DRY_RUN.value:
        print(gin_setup.describe(how))
        print(cli.model_summary(serialize.load_run_config(RUN.value).model))
        return
    model = load(RUN.value)
    if CHAT.value or PROMPT.value is None:
        dialogue(model, how, PROMPT.value, IMAGE.value)
        return
    model.check_images(IMAGE.value)
    show(model.ask(chat.Conversation(), PROMPT.value, IMAGE.value, sampling=how, seed=SEED.value))


if __name__ == "__main__":
    command.run(main)
