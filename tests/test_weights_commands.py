"""import_weights and export_weights as a user calls them."""

import dataclasses
import importlib.util
import json
import sys

import pytest
from test_commands import error_line, run
from weights_helpers import assert_same_bits, llm_folder, read_folder, vision_folder

from bluelm_jax import config, serialize
from bluelm_jax.weights.folder import Folder
from bluelm_jax.weights.importing import Sources
from experiments import import_verify


def test_in_and_out(tmp_path):
    llm, tower = llm_folder(tmp_path / "llm", shards=2), vision_folder(tmp_path / "vision")
    (llm / "chat_template.jinja").write_text("{{ '[|Human|]:' }}")
    out, err = run(
        "experiments.import_weights", f"--llm={llm}", f"--vision={tower}",
        f"--out={tmp_path / 'run'}",
    )  # fmt: skip
    assert "Traceback" not in err
    assert "decoder" in out and "imported" in out and "drawn" in out
    assert " kB of weights" in out and "no tokenizer.json" in out
    assert "template: 'bluelm', recognised in the folder\n" in out
    assert json.loads((tmp_path / "run" / "import.json").read_text())["seed"] == 0
    out, _ = run(
        "experiments.export_weights", f"--run={tmp_path / 'run'}", f"--out={tmp_path / 'out'}"
    )
    assert f"{tmp_path / 'out'}/connector: " in out and " kB of weights" in out
    assert_same_bits(read_folder(tmp_path / "out" / "llm"), read_folder(llm))
    assert_same_bits(read_folder(tmp_path / "out" / "vision"), read_folder(tower))


def test_verification_that_cannot_run_is_a_failure(tmp_path, monkeypatch):
    """In this process, with the packages hidden: the line says so and `complete` is False."""
    folder = Folder(llm_folder(tmp_path / "llm"))
    monkeypatch.setitem(sys.modules, "torch", None)
    found = import_verify.verify(tmp_path, Sources(llm=folder))
    assert "not verified: import of torch halted" in found.text and not found.complete
    found = import_verify.verify(tmp_path, Sources())
    assert "neither a language model nor a tower" in found.text and not found.complete


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="torch is here, so --verify can run"
)
def test_verify_without_torch_exits_with_1(tmp_path):
    llm = llm_folder(tmp_path / "llm")
    out, err = run(
        "experiments.import_weights", f"--llm={llm}", f"--out={tmp_path / 'run'}", "--verify",
        status=1,
    )  # fmt: skip
    assert "not verified: No module named 'torch'" in out
    assert (
        error_line(err)
        == f"error: --verify: not verified, see above; {tmp_path / 'run'} is written"
    )
    assert (tmp_path / "run" / "config.json").is_file()


def test_a_model_of_ones_own(tmp_path):
    """--gin_file with a model alone; the folder that does not fit is named, in one line."""
    llm = llm_folder(tmp_path / "llm")
    _, err = run(
        "experiments.import_weights", f"--llm={llm}", f"--out={tmp_path / 'run'}",
        "--gin_file=gin_configs/models/bluelm_v_minicpm_2b.gin", status=2,
    )  # fmt: skip
    line = error_line(err)
    assert f"{llm} holds another model: vocab_size: 40, the model has 122753" in line
    assert not (tmp_path / "run").exists()


def test_a_run_of_ones_own(tmp_path):
    """A gin file that fits: the run is its run, and what the folder lacks is drawn."""
    cfg = config.DecoderConfig(
        vocab_size=262, width=16, depth=1, mlp_dim=32, num_heads=2, num_kv_heads=1, head_dim=8,
        max_length=512,
    )  # fmt: skip
    llm = llm_folder(tmp_path / "llm", cfg)
    out, _ = run(
        "experiments.import_weights", f"--llm={llm}", f"--out={tmp_path / 'run'}", "--seed=3",
        "--gin_file=tests/testdata/tiny.gin",
    )  # fmt: skip
    assert out.count("drawn") == 3
    made = serialize.load_run_config(tmp_path / "run")
    assert made.model.decoder == dataclasses.replace(cfg, max_length=128)
    assert made.data.seq_len == 48 and made.data.template == "bluelm"
