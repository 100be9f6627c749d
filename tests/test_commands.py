"""The command line as a user calls it: each command is a process of its own."""

import json
import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from bluelm_jax.data.rendering import reading_pages
from gin_configs import command, errors

ROOT = pathlib.Path(__file__).parent.parent
TINY_GIN = "--gin_file=tests/testdata/tiny.gin"


def start(module, *arguments):
    """Starts `python -m module` in the repository."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process, status=0):
    """Its output, standard error; the exit status must be `status`."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == status, f"{process.args}\n{out}\n{err}"
    return out, err


def run(*arguments, status=0):
    return finish(start(*arguments), status)


def error_line(err):
    """The one line that says what is wrong."""
    assert "Traceback" not in err, err
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, err
    return lines[0]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Twenty pages of two digits to train on, and three to read."""
    folder = tmp_path_factory.mktemp("pages")
    pages = reading_pages.stage1(num_digits=2, tile_size=28)
    reading_pages.write_split(folder, pages, seed=0, split="train", num_pages=20)
    reading_pages.write_split(folder, pages, seed=0, split="eval", num_pages=3)
    return folder


def train_arguments(data, workdir, *more):
    path = f"--gin_bindings=SourceConfig.path = '{data / 'stage1_train.json'}'"
    return ("experiments.train", TINY_GIN, path, f"--workdir={workdir}", *more)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """A run of four steps, and what the command printed."""
    workdir = tmp_path_factory.mktemp("runs") / "tiny"
    out, err = run(*train_arguments(data, workdir))
    return workdir, out, err


def test_train(trained):
    workdir, out, err = trained
    assert "step 4 in" in out and str(workdir) in out
    assert "Traceback" not in err and "Warning" not in err, err
    names = {path.name for path in workdir.iterdir()}
    assert {"config.json", "config.gin", "metrics.jsonl", "checkpoints"} <= names
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert "TrainConfig.steps = 4" in (workdir / "config.gin").read_text()


def test_train_again_and_dry_run(trained, data, tmp_path):
    """A finished run stays as it is; a dry run writes nothing."""
    workdir, _, _ = trained
    before = (workdir / "metrics.jsonl").read_bytes()
    again = start(*train_arguments(data, workdir))
    dry = start(*train_arguments(data, tmp_path / "dry", "--dry_run"))
    assert "\n0 steps in" in finish(again)[0]
    assert (workdir / "metrics.jsonl").read_bytes() == before
    out, _ = finish(dry)
    for expected in ("model: VLMConfig", "parameters", "tokens a view: 4x4 patches -> 2x2 = 4",
                     "trained: vision", "tokens [4, 48], tiles [1, 4, 28, 28, 3]"):  # fmt: skip
        assert expected in out
    assert not (tmp_path / "dry").exists()


def test_evaluate_and_generate(trained, data, tmp_path):
    workdir, _, _ = trained
    image = json.loads((data / "stage1_eval.json").read_text())[0]["image"]
    evaluate = start(
        "experiments.evaluate", f"--run={workdir}", f"--data_json={data / 'stage1_eval.json'}",
        f"--image_root={data}", f"--out={tmp_path / 'readings.json'}",
        "--gin_bindings=EvalConfig.batch_size = 2", "--limit=3",
        "--gin_bindings=SamplingConfig.max_new_tokens = 8",
    )  # fmt: skip
    generate = start(
        "experiments.generate", f"--run={workdir}", f"--image={data / image}", "--prompt=Read.",
        "--gin_bindings=SamplingConfig.max_new_tokens = 4",
    )  # fmt: skip
    out, _ = finish(evaluate)
    scores = dict(line.split() for line in out.splitlines())
    assert scores["samples"] == "3" and 0 <= float(scores["character_accuracy"]) <= 1
    written = json.loads((tmp_path / "readings.json").read_text())
    readings = written["readings"]
    assert scores["left_out"] == "0" and written["counted"]["counts"] == {}
    assert written["settings"]["sampling"]["max_new_tokens"] == 8
    assert [r["name"].rpartition("stage1-eval-")[2][:6] for r in readings] == [
        "000000", "000001", "000002"
    ]  # fmt: skip
    assert all(len(r["reference"]) == 2 and r["views"] == 1 and r["tokens"] == 4 for r in readings)
    assert all(pathlib.Path(r["image"]).is_file() for r in readings)
    out, _ = finish(generate)
    assert len(out.rstrip("\n")) <= 4


def test_export_and_run_the_bundle(trained, data, tmp_path):
    """The exporter's commands in processes of their own: each registers its classes by itself."""
    workdir, _, _ = trained
    bundle, gin = tmp_path / "bundle", "--gin_file=gin_configs/export/quickstart.gin"
    image = json.loads((data / "stage1_eval.json").read_text())[0]["image"]
    small = "--gin_bindings=ExportConfig.cache_size = 64"  # The run's model takes 128 positions.
    export = ("export.to_tflite", f"--run={workdir}", f"--out={bundle}", gin, small)
    out, _ = run(*export, "--dry_run")
    assert "cache_size = 64" in out and not bundle.exists()
    out, _ = run(*export)
    assert "decoder.tflite" in out and (bundle / "manifest.json").is_file()
    out, _ = run(
        "export.run", f"--bundle={bundle}", f"--image={data / image}", "--prompt=Read.",
        "--gin_bindings=RunnerConfig.max_new_tokens = 3",
    )  # fmt: skip
    assert "answer:" in out and "decode" in out


def test_a_dialogue_without_images(trained):
    """Text alone, then a missing image, then text again: a mistake does not end it."""
    workdir, _, _ = trained
    command = [sys.executable, "-m", "experiments.generate", f"--run={workdir}",
               "--gin_bindings=SamplingConfig.max_new_tokens = 2"]  # fmt: skip
    done = subprocess.run(
        command, input="Hello?\n/image none.png\nRead.\nHello?\n/quit\n", cwd=ROOT,
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers = done.stdout.split("\n")
    assert len(answers) >= 3 and "none.png" in error_line(done.stderr)


def test_mistakes_end_in_one_line(trained, data, tmp_path):
    """Started together, since starting is what takes the time."""
    workdir, _, _ = trained
    other = shutil.copytree(workdir, tmp_path / "other")
    cases = [
        (("experiments.train", TINY_GIN, "--workdri=x"), "workdri"),
        (("experiments.train", TINY_GIN), "--workdir"),
        (train_arguments(data, other, "--gin_bindings=DecoderConfig.mlp_dim = 64"),
         "model.decoder.mlp_dim 32 -> 64"),
        (train_arguments(tmp_path, tmp_path / "new"), str(tmp_path / "stage1_train.json")),
        (("experiments.evaluate", f"--run={tmp_path}", "--data_json=x.json"), "config.json"),
    ]  # fmt: skip
    for arguments, expected in cases:
        _, err = run(*arguments, status=2)
        assert expected in error_line(err)


# The guard around every command, in this process ----------------------------------------------------


def guarded(error, monkeypatch):
    """Exit status of a command whose main raises `error`."""

    def main():
        raise error

    monkeypatch.setattr(command.app, "run", lambda f, **_: f(["command"]))
    with pytest.raises(SystemExit) as caught:
        command.run(main)
    return caught.value.code


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ValueError("steps = 0: must be > 0"), 2, "error: steps = 0: must be > 0\n"),
        (FileNotFoundError(2, "No such file", "a.png"), 2, "a.png"),
        (PermissionError(13, "Permission denied", "out"), 2, "out"),
        (OSError(28, "No space left on device", "x.gin"), 2,
         "error: No space left on device: x.gin\n"),
        (FloatingPointError("loss = nan at step 3"), 2, "error: loss = nan at step 3\n"),
        (KeyboardInterrupt(), 130, "the same command continues where this stopped"),
    ],
)  # fmt: skip
def test_exit_status(error, status, message, monkeypatch, capsys):
    assert guarded(error, monkeypatch) == status
    assert message in capsys.readouterr().err


def test_a_command_that_keeps_nothing_says_so(monkeypatch, capsys):
    @errors.starts_anew()
    def main():
        raise KeyboardInterrupt

    monkeypatch.setattr(command.app, "run", lambda f, **_: f(["command"]))
    with pytest.raises(SystemExit) as caught:
        command.run(main)
    assert caught.value.code == 130 and "starts anew" in capsys.readouterr().err


@pytest.mark.parametrize("lines", [1, 100_000])  # Of which a closed pipe shows at the end, or amid.
def test_a_closed_pipe_ends_quietly(lines):
    program = f"""
from gin_configs.errors import guarded
import sys
def main(argv):
    sys.stdin.read()
    for _ in range({lines}):
        print("a line")
guarded(main)([])
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout and process.stdin and process.stderr
    process.stdout.close()
    process.stdin.close()
    assert process.wait(60) == 141 and process.stderr.read() == b""
    process.stderr.close()


def test_programming_errors_keep_their_traceback(monkeypatch):
    def main():
        raise KeyError("a bug")

    monkeypatch.setattr(command.app, "run", lambda f, **_: f(["command"]))
    with pytest.raises(KeyError):
        command.run(main)


def test_stray_arguments(monkeypatch, capsys):
    monkeypatch.setattr(command.app, "run", lambda f, **_: f(["command", "gin_configs/x.gin"]))
    with pytest.raises(SystemExit) as caught:
        command.run(lambda: None)
    assert caught.value.code == 2 and "gin_configs/x.gin" in capsys.readouterr().err
