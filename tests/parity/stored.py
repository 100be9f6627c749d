"""References on disk, so that the test suite needs no PyTorch."""

from __future__ import annotations

import dataclasses
import json
import pathlib

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save

from tests.parity import cases
from tests.parity.cases import Case

Arrays = dict[str, np.ndarray]
FOLDER = pathlib.Path(__file__).parent.parent / "testdata" / "parity"
COMMAND = "make parity-goldens"


def case_of(name: str, seed: int) -> Case:
    """The stored case: bfloat16 for the first seed only, which keeps the files small."""
    case = cases.GOLDEN[name]
    if seed == cases.SEEDS[0]:
        return case
    return dataclasses.replace(case, extras=tuple(x for x in case.extras if x != "bfloat16"))


def described(name: str) -> dict:
    """The case as the file states it, so that a change of cases.py shows."""
    return json.loads(json.dumps(dataclasses.asdict(cases.GOLDEN[name])))


def path_of(name: str) -> pathlib.Path:
    return FOLDER / f"{name}.safetensors"


def pack(name: str, runs: dict[int, Arrays], facts: dict, versions: dict[str, str]) -> bytes:
    """The file's bytes; one metadata key, since the order of several is not fixed."""
    about = {"versions": versions, "case": described(name), "facts": facts}
    # safetensors writes the memory behind an array, whatever its strides say.
    arrays = {
        f"{seed}/{key}": np.ascontiguousarray(x)
        for seed, run in runs.items()
        for key, x in run.items()
    }
    return save(arrays, {"parity": json.dumps(about, sort_keys=True)})


def read(name: str, seed: int) -> tuple[Arrays, dict]:
    """Outputs of one seed, and what `pack` stated.

    Raises:
      ValueError: the file is of another case than cases.py states now.
    """
    with safe_open(path_of(name), "numpy") as file:
        about = json.loads(file.metadata()["parity"])
        start = f"{seed}/"
        keys = [key for key in file.keys() if key.startswith(start)]  # noqa: SIM118
        arrays = {key.removeprefix(start): file.get_tensor(key) for key in keys}
    if about["case"] != described(name):
        raise ValueError(f"{path_of(name).name} holds another case than cases.py: run `{COMMAND}`")
    return arrays, about
