"""Every output of every layer against stored outputs of transformers; `make parity` compares live."""

import dataclasses

import numpy as np
import pytest

from tests.parity import cases, compare, stored

HELP = """
The library no longer computes what transformers computes. The stored values come from transformers
alone, so they stay right whatever changes here: mend the library (`make parity` tries more sizes and
seeds). Run `make parity-goldens` only after editing tests/parity/cases.py or reference.py.
"""


@pytest.mark.parametrize("seed", cases.SEEDS)
@pytest.mark.parametrize("name", cases.GOLDEN)
def test_parity(name, seed):
    reference, about = stored.read(name, seed)
    results = compare.run(stored.case_of(name, seed), seed, reference, about["facts"])
    wrong = [str(result) for result in results if not result.passed]
    assert results and not wrong, "\n".join([f"{name}, seed {seed}:", *wrong, HELP])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rms_norm_eps": 1.01e-3}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_010.0}}),
        ("minicpm", {"scale_depth": 1.4002}),
        ("minicpm", {"dim_model_base": 5.001}),
        ("siglip", {"layer_norm_eps": 1.1e-3}),
    ],
)
def test_a_small_change_is_noticed(name, change):
    """So the bound of 1e-5 is one that a slip in a constant does not pass."""
    case = dataclasses.replace(cases.GOLDEN[name], extras=(), new_tokens=0)
    reference, about = stored.read(name, 0)
    facts = about["facts"] | {"config": about["facts"]["config"] | change}
    assert not all(result.passed for result in compare.run(case, 0, reference, facts))


def test_results_fail_on_nan_and_on_shapes():
    assert not compare.Result("nothing", float("nan"), 1.0).passed
    with pytest.raises(ValueError, match=r"ours \(2,\), reference \(3,\)"):
        compare.relative(np.zeros(2), np.ones(3))


def test_stored_references_are_few_and_of_these_cases():
    files = sorted(stored.FOLDER.iterdir())
    assert [path.stem for path in files] == sorted(cases.GOLDEN)
    assert sum(path.stat().st_size for path in files) < 300_000
    assert len(cases.SEEDS) >= 3
    for name in cases.GOLDEN:
        _, about = stored.read(name, 0)
        assert set(about["versions"]) == {"torch", "transformers"}


def test_a_changed_case_asks_for_new_references(monkeypatch):
    longer = dataclasses.replace(cases.GOLDEN["llama"], length=9)
    monkeypatch.setitem(cases.GOLDEN, "llama", longer)
    with pytest.raises(ValueError, match=r"llama.safetensors .* run `make parity-goldens`"):
        stored.read("llama", 0)
