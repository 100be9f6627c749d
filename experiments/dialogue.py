"""A dialogue over a model, line by line: questions, and commands that start with /."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from bluelm_jax import chat, run_folder
from bluelm_jax.chat_session import Session
from bluelm_jax.sampling import SamplingConfig
from gin_configs.errors import USER_ERRORS

HELP = """\
/image PATH   adds an image to the next question; repeat it for several
/images       lists the images that wait
/history      shows the conversation so far
/reset        forgets the conversation and waiting images
/help         this text
/quit         ends
A line that starts with // is a question that starts with /"""


class Dialogue:
    """A conversation from lines; `handle` does what one line asks for."""

    def __init__(self, model: chat.Chat, how: SamplingConfig, seed: int):
        self._model, self._how, self._seed = model, how, seed
        self.reset()

    def reset(self) -> None:
        """Forgets everything."""
        self._session: Session[list[str]] = Session(self._model.ask)
        self._images: list[str] = []
        self._marks: list[str] = []  # Of the images of each turn.

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
            write(("\n".join(self._images) or "no images wait") + "\n")
        elif word == "/history":
            for marks, (question, answer) in zip(self._marks, self._session.history, strict=True):
                write(f"> {marks}{question}\n{answer}\n")
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
        session, images = self._session, self._images
        pieces = session.stream(question, images, sampling=self._how, seed=self._seed)
        try:
            show(pieces)
        finally:
            pieces.close()  # An answer that broke off stands as far as it came.
            if len(session.history) > len(self._marks):
                self._images = []
                self._marks.append("".join(f"[{path}] " for path in images))


def show(answer: Iterable[str]) -> None:
    """Prints an answer as it comes."""
    for piece in answer:
        write(piece)
    write("\n")


def write(text: str) -> None:
    """Prints without a line end; "?" for what the encoding of standard output lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, errors="replace").decode(encoding), end="", flush=True)


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
    model: chat.Chat, how: SamplingConfig, seed: int, first: str | None, images: Sequence[str]
) -> None:
    """Questions from standard input, one a line; a mistake is named and does not end it."""
    talk = Dialogue(model, how, seed)
    opening = [f"/image {path}" for path in images]
    if first is not None:
        opening.append("/" + first if first.startswith("/") else first)
    for line in opening:
        talk.handle(line)
    for line in lines():
        try:
            if not talk.handle(line):
                return
        except USER_ERRORS as e:
            print(f"error: {e}", file=sys.stderr, flush=True)


def load(directory: str) -> chat.Chat:
    """The model of a run directory; ValueError names what is missing."""
    run, weights = run_folder.load(directory)
    return chat.Chat(weights, run)
