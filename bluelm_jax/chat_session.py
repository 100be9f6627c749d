"""A conversation that keeps itself: what was said, and the answer that is still open."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

from bluelm_jax.chat import Answer, Conversation

Images = TypeVar("Images")  # What `ask` takes as a question's images.


class Session(Generic[Images]):
    """A conversation: `ask` knows what was said before.

    Args:
      ask: opens an answer to (conversation so far, question, images, **options): `Chat.ask`, or
        what stands for it, such as `api.Model.ask`.

    Attributes:
      history: (question, answer) of each turn.
    """

    def __init__(self, ask: Callable[..., Answer]):
        self._ask, self._past = ask, Conversation()
        self._open: tuple[str, Answer] | None = None
        self.history: list[tuple[str, str]] = []

    def ask(self, question: str, images: Images | None = None, **options: Any) -> str:
        """The answer to the next question.

        Args:
          question: its text.
          images: the images that go with it.
          **options: further arguments of the function that the session was made with; for
            `api.Model.chat` those of `Model.generate`.
        """
        return "".join(self.stream(question, images, **options))

    def stream(
        self, question: str, images: Images | None = None, **options: Any
    ) -> Generator[str, None, None]:
        """The answer in pieces, as they are generated. What is left unread was not said.

        An answer that is left, by the next question or by an exception, stands as far as it came.
        """
        self._settle()
        answer = self._ask(self._past, question, () if images is None else images, **options)
        self._open = mine = question, answer
        try:
            yield from answer
        finally:
            if self._open is mine:
                self._settle()

    def _settle(self) -> None:
        """Ends the answer that is open, and keeps what was said."""
        if self._open is None:
            return
        (question, answer), before = self._open, self._past.turns
        self._past, self._open = answer.settle(), None
        if self._past.turns > before:
            self.history.append((question, answer.text))
