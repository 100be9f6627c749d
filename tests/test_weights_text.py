"""Template and system text through an export: for our own loader, and in Jinja for others."""

import dataclasses
import json

import jinja2
import pytest
from model_helpers import make_run
from tokenizers import Tokenizer, models, pre_tokenizers
from weights_helpers import MODEL, llm_folder, make, sources

import bluelm_jax
from bluelm_jax import data_config
from bluelm_jax.data import conversation, templates
from bluelm_jax.weights import WeightsError, chat_template, exporting, hf_run, tokenizer_files

WORDS = ("<unk>", "<s>", "</s>", *(f"w{i}" for i in range(37)))
TURNS = [
    conversation.Turn("human", "What\nis «this»?"), conversation.Turn("assistant", "A \\ \"b\""),
    conversation.Turn("human", "Why?"),
]  # fmt: skip
TEXT = dataclasses.replace(MODEL, newline=False)
SYSTEM = "Be\tbrief, 简短 {{ }}."


def text_run(path, template, system):
    """A run folder of a language model with a tokenizer, and its run config."""
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path / "tokenizer.json"))
    data = dataclasses.replace(
        make_run(model=TEXT).data, template=template, system=system,
        tokenizer=data_config.TokenizerFile(path="tokenizer.json"),
    )  # fmt: skip
    run = dataclasses.replace(make_run(model=TEXT), data=data)
    found = sources({"llm": llm_folder(path / "llm")}, "llm")
    files = {"tokenizer.json": path / "tokenizer.json"}
    make(path / "run", run, found, seed=None, files=files)
    return path / "run"


@pytest.mark.parametrize(
    ("template", "system"), [("vicuna", SYSTEM), ("bluelm", ""), ("plain", "")]
)
def test_an_export_loads_with_its_template(tmp_path, template, system):
    run = text_run(tmp_path, template, system)
    exporting.export_run(run, tmp_path / "out")
    llm = tmp_path / "out" / "llm"
    found = tokenizer_files.find(llm, {})
    assert (found.template, found.system) == (template, system)
    assert (hf_run.load(llm)[0].data.system, found.choice.bos) == (system, "<s>")
    ours, theirs = bluelm_jax.load(run), bluelm_jax.load(llm)
    assert theirs.run.data.template == template
    question = "" if template == "plain" else "w1 w2"
    answers = [m.generate(None, question, max_new_tokens=5) for m in (ours, theirs)]
    assert answers[0] == answers[1] != ""


def test_a_template_of_another_version_is_named(tmp_path):
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps({"bluelm_jax_template": "later", "chat_template": "<|im_start|>"}))
    with pytest.raises(WeightsError, match=r"bluelm_jax_template: template 'later' is unknown"):
        tokenizer_files.find(tmp_path, {})
    path.write_text(json.dumps({"bluelm_jax_system": 3}))
    with pytest.raises(WeightsError, match="bluelm_jax_system = 3: must be text"):
        tokenizer_files.find(tmp_path, {})


def as_text(segments):
    return "".join({"bos": "<s>", "eos": "</s>"}.get(s.kind, s.text) for s in segments)


@pytest.mark.parametrize("name", sorted(set(templates.TEMPLATES) - {"plain"}))
@pytest.mark.parametrize("system", ["", SYSTEM])
def test_jinja_renders_what_our_templates_do(name, system):
    template = templates.get_template(name)
    system = system if template.system else ""
    made = jinja2.Environment().from_string(chat_template.jinja(template, system))
    roles = {"human": "user", "assistant": "assistant"}
    messages = [{"role": roles[turn.speaker], "content": turn.text} for turn in TURNS]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    whole = conversation.render(TURNS, template, system=system)
    assert made.render(messages=messages, **tokens) == as_text(whole)
    asked = [*TURNS, conversation.Turn("assistant", "")]
    prompt, _ = conversation.render_prompt(asked, template, system=system)
    shown = made.render(messages=messages, add_generation_prompt=True, **tokens)
    assert shown == as_text(prompt)
    if template.system:
        own = [conversation.Turn("system", "Own."), *TURNS]
        messages.insert(0, {"role": "system", "content": "Own."})
        expected = as_text(conversation.render(own, template, system=system))
        assert made.render(messages=messages, **tokens) == expected


def test_a_template_that_drops_questions_has_no_jinja():
    assert chat_template.jinja(templates.get_template("plain")) is None
