"""Start-up checks: every template with tokenizers that lack what it needs."""

import pytest
import tokenizers
from data_helpers import make_pipeline, record, write_json
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from bluelm_jax.data import templates
from bluelm_jax.data.tokenizer import ByteTokenizer, TokenizerJson, check_fits
from bluelm_jax.data_config import TokenizerFile

NEEDED = [(name, token) for name, t in templates.TEMPLATES.items() for token in t.special_tokens]
ROLES = [
    (name, role)
    for name, t in templates.TEMPLATES.items()
    for role in ("bos", "eos")
    if any("{" + role + "}" in text for text in (t.start, t.answer, t.end_of_turn, t.after_turn))
]


def write_tokenizer(folder, specials):
    names = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(t, special=True) for t in specials])
    path = folder / "tokenizer.json"
    made.save(str(path))
    return str(path)


def start(folder, name, specials, **roles):
    """A pipeline with a tokenizer.json of these special tokens."""
    path = write_json(folder / "a.json", [record("a", "Q", "A")])
    choice = TokenizerFile(path=write_tokenizer(folder, specials), **roles)
    return make_pipeline(path, template=name, tokenizer=choice)


@pytest.mark.parametrize("name", templates.TEMPLATES)
def test_a_tokenizer_with_everything_is_accepted(name, tmp_path):
    specials = ("<s>", "</s>", *templates.TEMPLATES[name].special_tokens)
    pipeline = start(tmp_path, name, specials)
    source, records = pipeline.config.sources[0], pipeline.records[0]
    made = pipeline.maker.make(records[0], source, records.where(0))
    end = templates.end_of_turn_id(templates.TEMPLATES[name], pipeline.tokenizer)
    assert made.tokens[made.supervised].tolist()[-1] == end
    ids = [pipeline.tokenizer.token_id(t) for t in templates.TEMPLATES[name].special_tokens]
    assert all(i in made.tokens.tolist() for i in ids)


@pytest.mark.parametrize(("name", "token"), NEEDED)
def test_each_missing_token_is_named(name, token, tmp_path):
    others = {"<s>", "</s>", *templates.TEMPLATES[name].special_tokens} - {token}
    with pytest.raises(ValueError) as caught:
        start(tmp_path, name, sorted(others))
    assert str(caught.value) == (
        f"template {name!r} needs the token {token!r}, which the tokenizer lacks"
    )


@pytest.mark.parametrize(("name", "role"), ROLES)
def test_each_missing_role_is_named(name, role, tmp_path):
    specials = ("<s>", "</s>", *templates.TEMPLATES[name].special_tokens)
    with pytest.raises(ValueError, match=f"template {name!r} needs a {role} token"):
        start(tmp_path, name, specials, **{role: None})


def test_roles_that_the_file_lacks_are_named(tmp_path):
    path = write_tokenizer(tmp_path, ["</s>"])
    with pytest.raises(ValueError, match=r"tokenizer\.json: bos token '<s>' is not in the vocab"):
        TokenizerJson(path)
    with pytest.raises(ValueError, match=r"tokenizer\.json: pad token '<pad>' is not in the vocab"):
        TokenizerJson(path, bos=None, pad="<pad>")
    made = TokenizerJson(path, bos=None)
    assert (made.bos_id, made.pad_id) == (None, made.eos_id)


def test_a_vocabulary_larger_than_the_models_is_an_error():
    check_fits(ByteTokenizer(), 260)
    with pytest.raises(ValueError, match=r"has 260 ids, model\.decoder\.vocab_size = 259"):
        check_fits(ByteTokenizer(), 259)


def test_a_new_template_is_one_entry(tmp_path, monkeypatch):
    mine = templates.Template(name="mine", user="Q: {text}\n", assistant="A:", answer=" {text}")
    monkeypatch.setitem(templates.TEMPLATES, "mine", mine)
    pipeline = start(tmp_path, "mine", ["<s>", "</s>"])
    source, records = pipeline.config.sources[0], pipeline.records[0]
    made = pipeline.maker.make(records[0], source, records.where(0))
    assert pipeline.tokenizer.decode(made.tokens) == "Q: Q\nA: A"
    assert pipeline.tokenizer.decode(made.tokens[made.supervised]) == " A"
