"""Tokenizers: bytes, and `tokenizer.json` files of the three common builds."""

import copy
import importlib.util
import pickle

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from bluelm_jax.data import tokenizer
from bluelm_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from bluelm_jax.data.tokenizer import ByteTokenizer, TokenizerJson
from bluelm_jax.data_config import ByteTokens, SentencePieceFile, TokenizerFile

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:;?!<>/|_[]()"


def vocabulary(*extra):
    names = ["<unk>", *[f"<0x{i:02X}>" for i in range(256)], "\u2581", *LETTERS, *extra]
    return {name: i for i, name in enumerate(names)}


def sentencepiece_like(prepend):
    """Llama's layout: spaces as U+2581, byte fallback, a space before every text if `prepend`."""
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581", "ab")]
    model = models.BPE(
        vocab=vocabulary("\u2581a", "ab", "\u2581ab"),
        merges=merges,
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    made = tokenizers.Tokenizer(model)
    steps = [normalizers.Replace(" ", "\u2581")]
    if prepend:
        steps.insert(0, normalizers.Prepend("\u2581"))
    made.normalizer = normalizers.Sequence(steps)
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prepend else []),
        ]
    )
    return made


def byte_level():
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


BUILDS = {
    "prefix space": lambda: sentencepiece_like(prepend=True),
    "no prefix space": lambda: sentencepiece_like(prepend=False),
    "byte level": byte_level,
}


@pytest.fixture(params=BUILDS, scope="module")
def from_file(request, tmp_path_factory):
    made = BUILDS[request.param]()
    made.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", "<|end|>")])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return TokenizerJson(path)


@given(st.text(max_size=30))
def test_bytes_round_trip(text):
    made = ByteTokenizer()
    ids = made.encode(text)
    assert made.decode([1, *ids, 2]) == text
    assert len(ids) == len(text.encode()) and all(4 <= i < 260 for i in ids)


def test_byte_ids_are_fixed():
    plain, more = ByteTokenizer(), ByteTokenizer(["<a>", "<b>"])
    assert plain.encode("A\n") == [69, 14] == more.encode("A\n")
    assert (plain.pad_id, plain.bos_id, plain.eos_id, plain.token_id("<image>")) == (0, 1, 2, 3)
    assert (plain.vocab_size, more.vocab_size) == (260, 262)
    assert (more.token_id("<a>"), more.token_id("<b>"), plain.token_id("<a>")) == (260, 261, None)
    assert plain.token_id("\n") == 14


def test_byte_template_text_and_content():
    made = ByteTokenizer(["<a>", "<a>b"])
    assert made.encode_template("x<a>b</s>é") == [*made.encode("x"), 261, 2, *made.encode("é")]
    assert made.decode(made.encode("x<a></s>")) == "x<a></s>"
    assert 2 not in made.encode("</s>")


def test_byte_token_text():
    made = ByteTokenizer()
    assert [made.token_text(i) for i in (2, 69, 4 + 0xC3, 999)] == [
        "</s>",
        "A",
        "<0xC3>",
        "<unused 999>",
    ]


@pytest.mark.parametrize("names", [["<s>"], [""], ["<a>", "<a>"]])
def test_bad_extra_tokens(names):
    with pytest.raises(ValueError, match="must be new and not empty"):
        ByteTokenizer(names)


@pytest.mark.parametrize("text", ["ab", " ab ab", "ab\nab", "\nab", "é ab", "a  b", "</s>", ""])
def test_pieces_join_to_the_text(from_file, text):
    """A turn is encoded in pieces: no space may appear where two of them meet."""
    marker = from_file.encode_template("<|end|>ab:")
    ids = [*marker, *from_file.encode(text)]
    assert from_file.decode(ids).removeprefix(" ") == "ab:" + text
    assert from_file.eos_id not in ids


def test_special_tokens_only_in_template_text(from_file):
    end = from_file.token_id("<|end|>")
    assert from_file.encode_template("a<|end|>").count(end) == 1
    assert end not in from_file.encode("a<|end|>")
    assert from_file.token_text(end) == "<|end|>"
    assert from_file.bos_id == from_file.token_id("<s>")
    assert from_file.pad_id == from_file.eos_id == from_file.token_id("</s>")
    assert max(from_file.bos_id, from_file.eos_id, end) < from_file.vocab_size


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_file_tokenizer_travels_to_workers(from_file, clone):
    other = clone(from_file)
    for text in ("ab</s> ab", "é"):
        assert other.encode(text) == from_file.encode(text)
        assert other.encode_template(text) == from_file.encode_template(text)


def test_missing_roles_and_files_are_named(from_file, tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json: eos token '<eos>' is not in the vocab"):
        TokenizerJson(from_file._path, eos="<eos>")
    assert TokenizerJson(from_file._path, bos=None).bos_id is None
    with pytest.raises(ValueError, match=r"none\.json: no such tokenizer file"):
        TokenizerJson(tmp_path / "none.json")


def test_load_follows_the_config(from_file, tmp_path):
    assert tokenizer.load(ByteTokens(extra_special_tokens=("<a>",))).vocab_size == 261
    choice = TokenizerFile(path=from_file._path, pad="<|end|>")
    assert tokenizer.load(choice).pad_id == from_file.token_id("<|end|>")
    expected, message = ValueError, "no such tokenizer file"
    if importlib.util.find_spec("sentencepiece") is None:
        expected, message = ImportError, "needs the package `sentencepiece`"
    with pytest.raises(expected, match=message):
        tokenizer.load(SentencePieceFile(path=str(tmp_path / "a.model")))


class FakeSentencePiece:
    """Stands in for a SentencePiece model: characters as pieces, a space put before every text."""

    pieces = ("<unk>", "<s>", "</s>", "\u2581", "\n", *LETTERS)

    def encode(self, text):
        text = "\u2581" + text.replace(" ", "\u2581") if text else ""
        return [self.pieces.index(c) if c in self.pieces else 0 for c in text]

    def decode(self, ids):
        text = "".join(self.pieces[i] for i in ids if i > 2)
        return text.replace("\u2581", " ")

    def id_to_piece(self, index):
        return self.pieces[index]

    def piece_to_id(self, piece):
        return self.pieces.index(piece) if piece in self.pieces else 0

    def is_control(self, index):
        return index in (1, 2)

    def vocab_size(self):
        return len(self.pieces)

    bos_id, eos_id, pad_id = (lambda self: 1), (lambda self: 2), (lambda self: -1)


def test_sentencepiece_pieces_and_control_symbols(monkeypatch, tmp_path):
    import sys
    import types

    module = types.ModuleType("sentencepiece")
    module.SentencePieceProcessor = lambda model_file: FakeSentencePiece()
    monkeypatch.setitem(sys.modules, "sentencepiece", module)
    (tmp_path / "a.model").write_bytes(b"x")
    made = SentencePieceTokenizer(tmp_path / "a.model")
    assert made.decode(made.encode("ab") + made.encode(" c")) == "ab c"
    assert made.encode_template("a</s>b") == [*made.encode("a"), 2, *made.encode("b")]
    assert 2 not in made.encode("</s>")
    assert (made.bos_id, made.eos_id, made.pad_id) == (1, 2, 2)
    assert (made.token_id("</s>"), made.token_id("zz")) == (2, None)


def test_the_vocabulary_reaches_to_the_highest_id(tmp_path):
    """Ids with a gap: four of them, and a model needs 501 rows."""
    made = tokenizers.Tokenizer(
        models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "a": 500}, unk_token="<unk>")
    )
    made.save(str(tmp_path / "tokenizer.json"))
    read = TokenizerJson(tmp_path / "tokenizer.json")
    assert read.encode("a") == [500] and read.vocab_size == 501
    tokenizer.check_fits(read, 501)
    with pytest.raises(ValueError, match=r"has 501 ids, model\.decoder\.vocab_size = 40"):
        tokenizer.check_fits(read, 40)
