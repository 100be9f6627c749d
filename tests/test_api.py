"""The facade: run folders and Hugging Face folders, images of every kind, turns, errors."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from model_helpers import make_run, weights
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from weights_helpers import llm_folder

import bluelm_jax
from bluelm_jax import checkpoints, serialize
from bluelm_jax.chat import Chat, Conversation
from bluelm_jax.sampling import SamplingConfig
from bluelm_jax.train_state import init_state

RUN = make_run()
PIXELS = np.random.default_rng(0).integers(0, 256, (31, 22, 3), np.uint8)
SHORT = {"max_new_tokens": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run folder as training leaves it."""
    path = tmp_path_factory.mktemp("run")
    text = serialize.to_json(RUN)
    (path / "config.json").write_text(text)
    saver = checkpoints.Checkpointer(path / "checkpoints")
    saver.save(1, init_state(RUN, weights(RUN.model)), {}, text)
    saver.close()
    return path


@pytest.fixture(scope="module")
def model(folder):
    return bluelm_jax.load(folder)


def test_answers_are_those_of_the_chat(model):
    expected = "".join(
        Chat(weights(RUN.model), RUN).ask(
            Conversation(), "Read.", [Image.fromarray(PIXELS)], sampling=SamplingConfig(**SHORT)
        )
    )
    assert model.generate(PIXELS, "Read.", **SHORT) == expected != ""
    assert "".join(model.stream(PIXELS, "Read.", **SHORT)) == expected
    assert model.generate(PIXELS, "Read.", temperature=2.0, seed=1, **SHORT) != expected


def test_every_kind_of_image_gives_the_same_answer(model, tmp_path):
    path = tmp_path / "image.png"
    Image.fromarray(PIXELS).save(path)
    kinds = [PIXELS, Image.fromarray(PIXELS), path, str(path), [path]]
    answers = {model.generate(kind, "Read.", **SHORT) for kind in kinds}
    assert len(answers) == 1
    grey = PIXELS[..., 0]
    as_colour = np.repeat(grey[..., None], 3, axis=-1)
    assert model.generate(grey, "R", **SHORT) == model.generate(as_colour, "R", **SHORT)
    two = model.generate([PIXELS, PIXELS], "Compare.", **SHORT)
    assert two != model.generate(None, "Compare.", **SHORT)


def test_a_chat_remembers(model):
    chat = model.chat()
    first = chat.ask("Read.", PIXELS, **SHORT)
    second = "".join(chat.stream("Again?", **SHORT))
    assert chat.history == [("Read.", first), ("Again?", second)]
    fresh = model.chat()
    fresh.ask("Read.", PIXELS, **SHORT)
    assert fresh.ask("Again?", **SHORT) == second
    assert model.chat().history == []


def test_a_chat_goes_on_after_a_mistake_and_after_a_broken_off_answer(model):
    chat = model.chat()
    with pytest.raises(ValueError, match=r"nowhere\.png: cannot be opened"):
        chat.ask("Read.", "nowhere.png", **SHORT)
    assert chat.history == []
    pieces = chat.stream("Read.", max_new_tokens=12)
    next(pieces)
    pieces.close()
    assert len(chat.history) == 1
    assert chat.ask("And?", **SHORT)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), r"\(4, 4, 3\), float32: must be uint8"),
        (np.zeros((4, 4, 2), np.uint8), r"\(4, 4, 2\), uint8"),
    ],
)
def test_what_is_no_image(model, image, message):
    with pytest.raises(TypeError, match=message):
        model.generate(image, "Read.")


def test_sampling_is_checked(model):
    with pytest.raises(ValueError, match=r"top_p = 0.0: must be in \(0, 1\]"):
        model.generate(None, "Read.", top_p=0.0)
    message = r"unknown sampling options \['tempreature'\]; known: .*temperature"
    with pytest.raises(TypeError, match=message):
        model.generate(None, "Read.", tempreature=1.0)


def test_weights_and_config_are_the_librarys(model):
    jax.tree.map(
        np.testing.assert_array_equal, model.weights["vision"], weights(RUN.model)["vision"]
    )
    assert model.config == RUN.model and model.sees_images
    assert model.tokenizer.decode(model.tokenizer.encode("abc")) == "abc"
    assert repr(model).startswith("Model(") and "float32" in repr(model)


def test_dtype(folder):
    assert bluelm_jax.load(folder, dtype="bfloat16").config.dtype == "bfloat16"


def hf_folder(path, **settings):
    """A language model of 40 words, with ChatML's markers."""
    llm_folder(path)
    words = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system"]
    words += [f"w{i}" for i in range(32)]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(words[:5])
    tokenizer.save(str(path / "tokenizer.json"))
    defaults = {
        "bos_token": "<s>",
        "eos_token": "<|im_end|>",
        "chat_template": "{{'<|im_start|>'}}",
    }
    (path / "tokenizer_config.json").write_text(json.dumps({**defaults, **settings}))
    return path


def test_a_hugging_face_folder(tmp_path):
    model = bluelm_jax.load(hf_folder(tmp_path / "llm"))
    assert not model.sees_images and list(model.weights) == ["decoder"]
    assert isinstance(model.generate(None, "w1 w2", **SHORT), str)
    with pytest.raises(ValueError, match="no vision tower"):
        model.generate(PIXELS, "w1")


def test_a_hugging_face_folder_without_a_known_template(tmp_path):
    path = hf_folder(tmp_path / "llm", chat_template="{{ messages }}")
    with pytest.raises(ValueError, match="its chat template is none of ours"):
        bluelm_jax.load(path)


def test_folders_that_are_none(tmp_path):
    with pytest.raises(ValueError, match="no such directory"):
        bluelm_jax.load(tmp_path / "none")
    with pytest.raises(ValueError, match="a run directory holds a"):
        bluelm_jax.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        bluelm_jax.load(tmp_path)


def test_importing_the_package_imports_no_jax():
    code = "import sys, bluelm_jax; assert 'load' in dir(bluelm_jax); print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = bluelm_jax.nothing
