"""The chat prompt: commands, history, streaming, mistakes, and the same through a pipe."""

import dataclasses
import io
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from model_helpers import TINY, make_run, replace, weights
from PIL import Image

from bluelm_jax import checkpoints, serialize
from bluelm_jax.sampling import SamplingConfig
from experiments import dialogue

ROOT = pathlib.Path(__file__).parent.parent
RUN = replace(make_run(), "model", decoder=dataclasses.replace(TINY.decoder, max_length=512))
NEW = SamplingConfig(max_new_tokens=4)


def write_run(folder, parts=("vision", "downsampler", "projector", "decoder")):
    """A run directory of the tiny model, with these parts of its weights."""
    folder.mkdir()
    (folder / "config.json").write_text(serialize.to_json(RUN))
    if len(parts) < 4:
        (folder / "import.json").write_text("{}")
    saved = checkpoints.Checkpointer(folder / "checkpoints")
    saved.save(0, {"params": {part: weights(RUN.model)[part] for part in parts}}, {}, "")
    saved.close()
    return folder


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "vlm")


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("images") / "page.png"
    pixels = np.random.default_rng(0).integers(0, 256, (24, 30, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture(scope="module")
def model(run_folder):
    return dialogue.load(str(run_folder))


@pytest.fixture
def talk(model):
    return dialogue.Dialogue(model, NEW, seed=0)


def test_an_answer_is_printed_and_kept(talk, capsys):
    assert talk.handle("Hello?")
    answer = capsys.readouterr().out
    assert answer.endswith("\n") and len(answer.rstrip("\n")) <= 4
    talk.handle("/history")
    assert capsys.readouterr().out == f"> Hello?\n{answer}"


def test_images_wait_for_the_next_question_only(talk, capsys, image):
    talk.handle(f"/image {image}")
    talk.handle(f"/image {image}")
    talk.handle("/images")
    assert capsys.readouterr().out == f"{image}\n{image}\n"
    talk.handle("Read.")
    talk.handle("/images")
    talk.handle("/history")
    out = capsys.readouterr().out
    assert "no images wait" in out and f"> [{image}] [{image}] Read." in out


def test_reset_forgets(talk, capsys, image):
    talk.handle("Hello?")
    first = capsys.readouterr().out
    talk.handle(f"/image {image}")
    talk.handle("/reset")
    talk.handle("/images")
    talk.handle("/history")
    assert capsys.readouterr().out == "no images wait\n"
    talk.handle("Hello?")
    assert capsys.readouterr().out == first


def test_other_commands(talk, capsys):
    assert talk.handle("/help") and "/image PATH" in capsys.readouterr().out
    assert not talk.handle("/quit")
    with pytest.raises(ValueError, match="unknown command /imagine"):
        talk.handle("/imagine a cat")
    talk.handle("//etc is a folder")
    capsys.readouterr()
    talk.handle("/history")
    assert capsys.readouterr().out.startswith("> /etc is a folder\n")


def test_mistakes_leave_the_conversation_as_it_was(talk, tmp_path, capsys):
    talk.handle("Hello?")
    with pytest.raises(ValueError, match=r"none\.png.*cannot be opened"):
        talk.handle(f"/image {tmp_path / 'none.png'}")
    with pytest.raises(ValueError, match="/image needs a path"):
        talk.handle("/image")
    with pytest.raises(ValueError, match="max_length = 512 leaves 508 before 4 new tokens"):
        talk.handle("x" * 600)
    capsys.readouterr()
    talk.handle("/history")
    assert capsys.readouterr().out.count(">") == 1
    talk.handle("Again")


def test_images_wait_until_a_question_has_its_answer(talk, image, capsys):
    talk.handle(f"/image {image}")
    with pytest.raises(ValueError, match="max_length = 512"):
        talk.handle("x" * 600)
    with pytest.raises(ValueError, match="2 <image> in the turns, 1 images"):
        talk.handle("a <image> <image>")
    talk.handle("/images")
    assert capsys.readouterr().out == f"{image}\n"
    talk.handle("Read.")
    capsys.readouterr()
    talk.handle("/images")
    assert capsys.readouterr().out == "no images wait\n"


def test_a_dialogue_goes_on_after_an_interruption(talk, monkeypatch, capsys):
    talk.handle("Hello?")

    def interrupted(text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(dialogue, "write", interrupted)
        talk.handle("Go")
    talk.handle("And?")
    capsys.readouterr()
    talk.handle("/history")
    assert [x for x in capsys.readouterr().out.splitlines() if x[:2] == "> "] == [
        "> Hello?", "> Go", "> And?",
    ]  # fmt: skip


def test_an_ascii_terminal_gets_question_marks(model, monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    dialogue.write("Grüße 你\n")
    assert out.buffer.getvalue() == b"Gr??e ?\n"


def test_without_a_vision_tower_images_are_refused(tmp_path, image):
    model = dialogue.load(str(write_run(tmp_path / "llm", ("decoder",))))
    talk = dialogue.Dialogue(model, NEW, seed=0)
    with pytest.raises(ValueError, match="no vision tower"):
        talk.handle(f"/image {image}")
    talk.handle("Hello?")


def test_folders_that_are_no_run(tmp_path, run_folder):
    with pytest.raises(ValueError, match="no such directory"):
        dialogue.load(str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        dialogue.load(str(tmp_path / "empty"))
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text((run_folder / "config.json").read_text())
    with pytest.raises(ValueError, match="no checkpoint in"):
        dialogue.load(str(tmp_path / "half"))


def test_a_missing_tokenizer_is_named(tmp_path, run_folder):
    changed = json.loads((run_folder / "config.json").read_text())
    changed["data"]["tokenizer"] = {"class": "TokenizerFile", "path": str(tmp_path / "t.json")}
    other = tmp_path / "run"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(changed))
    (other / "checkpoints").symlink_to(run_folder / "checkpoints")
    with pytest.raises(ValueError, match=r"t\.json: no such tokenizer file"):
        dialogue.load(str(other))


def command(*arguments, script=None):
    env = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    return subprocess.run(
        [sys.executable, "-m", "experiments.generate", *map(str, arguments)],
        cwd=ROOT, env=env, text=True, capture_output=True, input=script, timeout=240,
    )  # fmt: skip


def test_through_a_pipe(run_folder, image):
    """The whole program: flags, a first question, commands, a mistake, and the end of the input."""
    script = f"/image {image}\nWhat?\n/image none.png\n\nAnd?\n/history\n/quit\nNever asked\n"
    done = command(
        f"--run={run_folder}", "--chat", "--prompt=Hi", "--max_new_tokens=3", "--temperature=0.8",
        "--top_k=50", "--repetition_penalty=1.1", "--seed=3", script=script,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and done.stderr.count("error: ") == 1
    assert "none.png" in done.stderr
    for question in ("> Hi", f"> [{image}] What?", "> And?"):
        assert done.stdout.count(question) == 1
    assert "Never asked" not in done.stdout


def test_bad_flags_end_in_one_line(run_folder, image):
    done = command(f"--run={run_folder}", "--prompt=Hi", "--top_p=1.5", f"--image={image}")
    assert done.returncode == 2 and "SamplingConfig.top_p = 1.5" in done.stderr
    assert "Traceback" not in done.stderr
