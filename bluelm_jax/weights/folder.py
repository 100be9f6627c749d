"""A folder as Hugging Face's `save_pretrained` writes it: config.json and safetensors, many or one."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bluelm_jax import config
from bluelm_jax.params import Tree
from bluelm_jax.weights import convert, hf_config, names
from bluelm_jax.weights.plan import Plan, Shape, WeightsError, listed, make_plan
from bluelm_jax.weights.safetensors_file import DTYPES, Stored, read_header

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


class Folder(Mapping[str, np.ndarray]):
    """The tensors of a folder by name, each read when it is asked for.

    Attributes:
      path: the folder.
      config: its config.json; {} where it has none.
      tensors: where each tensor is.
    """

    def __init__(self, path: str | Path):
        """Reads headers only.

        Raises:
          WeightsError: no such folder, weights only as pickles, or an index, shard or header that
            is damaged or does not fit the others.
        """
        self.path = Path(path)
        if self.path.is_file() and self.path.suffix in PICKLES:
            raise WeightsError(_refusal(self.path))
        if not self.path.is_dir():
            raise WeightsError(f"{self.path}: no such folder")
        self.config: dict[str, Any] = _read_json(self.path / "config.json", required=False)
        self.tensors: dict[str, Stored] = _read_headers(self.path)

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name].read()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def shapes(self) -> dict[str, Shape]:
        """Shape of every tensor."""
        return {name: stored.shape for name, stored in self.tensors.items()}

    def largest_file(self) -> int:
        """Bytes of the largest shard."""
        files = {stored.path for stored in self.tensors.values()}
        return max((path.stat().st_size for path in files), default=0)

    def plan(self, part: names.Part) -> Plan:
        """What to read for a part; refuses tensors that are quantised or of other odd types."""
        plan = make_plan(part, self.shapes(), str(self.path))
        wanted = [name for read in plan.reads for name in read.names]
        odd = [
            f"{name}: {self.tensors[name].code}"
            for name in wanted
            if self.tensors[name].code not in DTYPES
        ]
        if odd:
            raise WeightsError(
                f"{self.path}: {len(odd)} weights are not of {', '.join(DTYPES)}: {listed(odd)}"
            )
        return plan

    def decoder_config(self) -> config.DecoderConfig:
        """The decoder that config.json describes."""
        return self._describe(hf_config.decoder_config)

    def vision_config(self) -> config.VisionConfig:
        """The vision tower that config.json describes."""
        return self._describe(hf_config.vision_config)

    def _describe(self, reader: Any) -> Any:
        if not self.config:
            raise WeightsError(f"{self.path}: no config.json")
        try:
            return reader(self.config)
        except ValueError as e:
            raise WeightsError(f"{self.path / 'config.json'}: {e}") from e


def load_hf_folder(
    path: str | Path, part: Literal["decoder", "vision"] | None = None
) -> tuple[config.DecoderConfig | config.VisionConfig, Tree]:
    """Config and weights of a model folder, in the dtype that they are stored in.

    Args:
      part: what to load; None takes the decoder of a language model and the tower of a vision
        model. A multimodal folder has both, and must be asked for one.

    Raises:
      WeightsError: a folder, config or tensor that cannot be used; the message says which and why.
    """
    folder = Folder(path)
    if part is None:
        both = "text_config" in folder.config and "vision_config" in folder.config
        kind = str(folder.config.get("model_type", "")).lower()
        if both and "siglip" not in kind:
            raise WeightsError(f"{path}: holds a decoder and a vision tower; name the part")
        part = "vision" if "siglip" in kind else "decoder"
    cfg = folder.decoder_config() if part == "decoder" else folder.vision_config()
    described = names.part_of(cfg)
    folder.plan(described)
    return cfg, convert.load(described, folder, folder.shapes())


def _read_headers(path: Path) -> dict[str, Stored]:
    """All tensors of all shards, each once."""
    shards, index = _shards(path)
    found: dict[str, Stored] = {}
    problems = []
    for shard in shards:
        for name, stored in read_header(shard).items():
            if name in found:
                problems.append(f"{name}: in {found[name].path.name} and in {shard.name}")
            found[name] = stored
    for name, shard_name in index.items():
        if name not in found:
            problems.append(f"{name}: in the index, but not in {shard_name}")
        elif found[name].path.name != shard_name and not problems:
            problems.append(f"{name}: in {found[name].path.name}, the index says {shard_name}")
    problems += [f"{name}: not in the index" for name in found if index and name not in index]
    if problems:
        raise WeightsError(f"{path}: {len(problems)} contradictions: {listed(problems)}")
    return found


def _shards(path: Path) -> tuple[list[Path], dict[str, str]]:
    """Files to read, and what the index says, {} without one."""
    if (path / INDEX).is_file():
        index = _read_json(path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise WeightsError(f"{path / INDEX}: has no weight_map")
        shard_names = sorted(set(map(str, index.values())))
        outside = [name for name in shard_names if Path(name).name != name]
        if outside:
            raise WeightsError(f"{path / INDEX}: names files outside the folder: {outside[:3]}")
        absent = [name for name in shard_names if not (path / name).is_file()]
        if absent:
            raise WeightsError(
                f"{path / INDEX}: {len(absent)} of {len(shard_names)} files are not there: "
                f"{listed(absent)}"
            )
        if SINGLE not in shard_names and (path / SINGLE).is_file():
            raise WeightsError(
                f"{path}: holds {SINGLE}, and {INDEX}, which names other files: remove the one that "
                "is out of date"
            )
        return [path / name for name in shard_names], index
    files = sorted(path.glob("*.safetensors"))
    if (path / SINGLE) in files:
        return [path / SINGLE], {}
    if len(files) == 1:
        return files, {}
    if files:
        raise WeightsError(f"{path}: {len(files)} safetensors files and no {INDEX}")
    pickles = sorted(p for p in path.iterdir() if p.suffix in PICKLES)
    if pickles:
        raise WeightsError(_refusal(pickles[0]))
    raise WeightsError(f"{path}: holds no safetensors file")


def _refusal(path: Path) -> str:
    return (
        f"{path}: pickled weights are never loaded, because loading a pickle runs whatever code it "
        "holds. Look for a safetensors version of the model, or, where you trust the file, convert "
        "it with transformers: AutoModel.from_pretrained(DIR).save_pretrained(OUT)"
    )


def _read_json(path: Path, required: bool = True) -> dict[str, Any]:
    if not path.is_file() and not required:
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as e:
        raise WeightsError(f"{path}: cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise WeightsError(f"{path}: holds a {type(value).__name__}, not an object")
    return value
