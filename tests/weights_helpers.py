"""Model folders for the tests of importing and exporting."""

import json
import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from model_helpers import make_run
from safetensors.numpy import load_file, save_file

from bluelm_jax import checkpoints, config, params
from bluelm_jax.weights import convert, hf_export, importing
from bluelm_jax.weights import names as tables
from bluelm_jax.weights.folder import Folder
from bluelm_jax.weights.importing import Sources

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
LLM = config.DecoderConfig(
    vocab_size=40, width=16, depth=3, mlp_dim=24, num_heads=4, num_kv_heads=2, head_dim=8,
    max_length=64, norm_eps=1e-6,
)  # fmt: skip
TOWER = config.VisionConfig(
    tile_size=20, patch_size=4, width=24, depth=3, mlp_dim=40, num_heads=2, norm_eps=1e-6
)


def random_tensors(part, seed=0, dtype=np.float32):
    """Random tensors of a part under the names of the tables."""
    rng = np.random.default_rng(seed)
    draws = {path: rng.normal(size=p.shape).astype(dtype) for path, p in part.declared().items()}
    return convert.tensors_of(part, convert.nest(draws))


def write_folder(path, tensors, config_json, shards=1):
    """A folder as save_pretrained leaves it; several shards get an index."""
    path = pathlib.Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config_json))
    if shards == 1:
        save_file(tensors, path / "model.safetensors")
        return path
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        mine = names[i::shards]
        save_file({name: tensors[name] for name in mine}, path / file)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def llm_folder(path, cfg=LLM, *, kind="auto", shards=1, seed=0, dtype=np.float32, change=None):
    """A language model; `change` edits its tensors."""
    tensors = random_tensors(tables.decoder_part(cfg), seed, dtype)
    if change:
        change(tensors)
    return write_folder(path, tensors, hf_export.decoder_json(cfg, kind), shards)


def vision_folder(path, cfg=TOWER, *, shards=1, seed=1, dtype=np.float32, change=None):
    """A vision tower as SiglipModel's part."""
    tensors = random_tensors(tables.vision_part(cfg), seed, dtype)
    if change:
        change(tensors)
    return write_folder(path, tensors, hf_export.vision_json(cfg), shards)


def read_folder(path):
    """All tensors of a folder, read by the safetensors package."""
    tensors = {}
    for file in sorted(pathlib.Path(path).glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def assert_same_bits(left, right):
    """Equal names, shapes, dtypes and bits, NaN included."""
    assert left.keys() == right.keys()
    for name, x in left.items():
        y = right[name]
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        assert x.tobytes() == y.tobytes(), name


def leaves(tree):
    return {k: np.asarray(v) for k, v in convert.flatten(jax.tree.map(np.asarray, tree)).items()}


MODEL = config.VLMConfig(vision=TOWER, decoder=LLM, newline=True)
RUN = make_run(model=MODEL)


def sources(folders, *parts):
    return Sources(**{part: Folder(folders[part]) for part in parts or ("llm", "vision")})


def make(out, run, found, dtype="keep", seed=0, **more):
    return importing.write(out, importing.prepare(run, found, dtype, seed), **more)


def restored(out, specs, dtype=jnp.float32, mesh=None):
    return checkpoints.restore_params(out, params.abstract(specs, dtype, mesh))
