"""Text of tokens as they come, whole characters only."""

from __future__ import annotations

from collections.abc import Sequence

from bluelm_jax.data.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # What decoding puts for bytes that are not (yet) a character.


class TextStream:
    """Decodes tokens one by one.

    A character may be spread over several tokens, and a token may read differently at the start of a
    text (SentencePiece drops its space). So text is given out only up to the last whole character, and
    decoded together with the tokens that were given out before it. All pieces together are
    `tokenizer.decode` of all tokens, for tokenizers whose decoding of a token depends on its
    neighbours only.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = self._shown = 0  # Tokens [context:shown] are decoded again, as context.

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next tokens; returns the text that has become whole, perhaps ''."""
        self._ids += [int(i) for i in ids]
        text, before = self._pending()
        if text.endswith(_INCOMPLETE) or len(text) <= before:
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text[before:]

    def finish(self) -> str:
        """What was held back; bytes that never became a character read U+FFFD."""
        text, before = self._pending()
        self._context = self._shown = len(self._ids)
        return text[before:]

    def _pending(self) -> tuple[str, int]:
        """Text from the context on, and how much of it has been given out."""
        decode = self._tokenizer.decode
        before = decode(self._ids[self._context : self._shown])
        return decode(self._ids[self._context :]), len(before)
