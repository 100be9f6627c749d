"""Text of tokens as they come: whole characters, and together what decoding all at once gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bluelm_jax.data.text_stream import TextStream
from bluelm_jax.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def pieces(ids, tokenizer=BYTES, size=1):
    stream = TextStream(tokenizer)
    found = [stream.push(ids[i : i + size]) for i in range(0, len(ids), size)]
    return [*found, stream.finish()]


def test_characters_come_whole():
    """Two, three and four bytes: nothing appears before the last of them."""
    assert pieces(BYTES.encode("aé")) == ["a", "", "é", ""]
    assert pieces(BYTES.encode("語")) == ["", "", "語", ""]
    assert pieces(BYTES.encode("🙂!")) == ["", "", "", "🙂", "!", ""]


def test_a_cut_character_reads_as_replacement_at_the_end_only():
    assert pieces(BYTES.encode("a語")[:-1]) == ["a", "", "", "\ufffd"]


def test_special_tokens_give_no_text():
    assert pieces([BYTES.bos_id, *BYTES.encode("x"), BYTES.eos_id]) == ["", "x", "", ""]


@given(text=st.text(max_size=30), size=st.integers(1, 5))
def test_pieces_together_are_the_text(text, size):
    try:
        ids = BYTES.encode(text)
    except UnicodeEncodeError:  # Half of a surrogate pair is no text.
        return
    found = pieces(ids, size=size)
    assert "".join(found) == BYTES.decode(ids) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in found)


@given(ids=st.lists(st.integers(0, 259), max_size=30), size=st.integers(1, 5))
def test_any_bytes_together_are_their_decoding(ids, size):
    assert "".join(pieces(ids, size=size)) == BYTES.decode(ids)


class Spaced:
    """Decodes as SentencePiece does: the space before the first word is dropped."""

    words = ("\u2581a", "\u2581b", "c", "<0xC3>", "<0xA9>")

    def decode(self, ids):
        data = b""
        for i in ids:
            word = self.words[i]
            byte = word.startswith("<0x")
            data += bytes([int(word[3:5], 16)]) if byte else word.replace("\u2581", " ").encode()
        return data.decode("utf-8", errors="replace").removeprefix(" ")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_spaces_between_words_are_kept(size):
    ids = [0, 1, 2, 3, 4, 0, 0]
    found = pieces(ids, Spaced(), size)
    assert "".join(found) == Spaced().decode(ids) == "a bcé a a"
