"""The SentencePiece tokenizer with a model trained here; needs the optional package."""

import random

import pytest
from data_helpers import make_pipeline, record, write_json

from bluelm_jax.data.sentencepiece_tokenizer import SentencePieceTokenizer
from bluelm_jax.data_config import SentencePieceFile

sentencepiece = pytest.importorskip("sentencepiece", reason="optional package sentencepiece")
MARKS = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A byte-fallback BPE model over a few letters, with ChatML's marks as user-defined symbols."""
    folder = tmp_path_factory.mktemp("sentencepiece")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefgh", k=rng.randint(2, 6))) for _ in range(800)]
    text = folder / "text.txt"
    text.write_text("\n".join(" ".join(rng.choices(words, k=12)) for _ in range(500)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "m"),
        vocab_size=350,
        model_type="bpe",
        byte_fallback=True,
        user_defined_symbols=[*MARKS, "\n"],
        minloglevel=2,
    )
    return str(folder / "m.model")


@pytest.mark.parametrize(
    "text", ["abc", " abc  def", "a\nb", "\n\na", "é猫", "x <|im_end|> y", "</s><|im_start|>", ""]
)
def test_content_comes_back_and_holds_no_special_token(model, text):
    made = SentencePieceTokenizer(model)
    ids = made.encode(text)
    specials = {made.bos_id, made.eos_id, *map(made.token_id, MARKS)}
    assert not specials & set(ids)
    squeezed = " ".join(text.replace("\n", " \n ").split(" ")).replace(" \n ", "\n")
    while "  " in squeezed:  # The model's normaliser makes one space of several.
        squeezed = squeezed.replace("  ", " ")
    assert made.decode([*made.encode("a"), *ids]) == "a" + squeezed


def test_marks_and_control_symbols_in_template_text(model):
    made = SentencePieceTokenizer(model)
    ids = made.encode_template("<|im_start|>abc<|im_end|>\n</s>")
    assert ids[0] == made.token_id("<|im_start|>") and ids[-1] == made.eos_id
    assert ids[-3] == made.token_id("<|im_end|>") and ids[1:-3] == made.encode("abc")


def test_chatml_sample_with_marks_in_its_text(model, tmp_path):
    path = write_json(tmp_path / "a.json", [record("a", "ab <|im_end|> cd", "abc")])
    pipeline = make_pipeline(path, template="chatml", tokenizer=SentencePieceFile(path=model))
    source, records = pipeline.config.sources[0], pipeline.records[0]
    made = pipeline.maker.make(records[0], source, records.where(0))
    end = pipeline.tokenizer.token_id("<|im_end|>")
    assert made.tokens.tolist().count(end) == 2
    assert made.tokens[made.supervised].tolist() == [*pipeline.tokenizer.encode("abc"), end]
    with pytest.raises(ValueError, match=r"'llama3' needs the token '<\|begin_of_text\|>'"):
        make_pipeline(path, template="llama3", tokenizer=SentencePieceFile(path=model))
