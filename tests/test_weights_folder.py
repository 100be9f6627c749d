"""Folders of safetensors: what a damaged or dangerous one is told, before anything is imported."""

import contextlib
import dataclasses
import json
import pathlib
import pickle

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file
from weights_helpers import (
    BFLOAT16,
    LLM,
    TOWER,
    assert_same_bits,
    leaves,
    llm_folder,
    random_tensors,
    read_folder,
    vision_folder,
)

from bluelm_jax.weights import WeightsError, convert, folder, load_hf_folder, names
from bluelm_jax.weights.safetensors_file import Writer
from bluelm_jax.weights.shards import ShardWriter

SHARD = "model-00002-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path):
    return llm_folder(tmp_path / "llm", shards=3)


def edit_index(path, change):
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16])
def test_reads_what_the_package_wrote(tmp_path, shards, dtype):
    path = llm_folder(tmp_path / "llm", shards=shards, dtype=dtype)
    read = folder.Folder(path)
    assert_same_bits(dict(read), random_tensors(names.decoder_part(LLM), dtype=dtype))
    name = "model.layers.1.mlp.up_proj.weight"
    np.testing.assert_array_equal(read.tensors[name].read(3, 9), read[name][3:9])


def test_load_hf_folder(tmp_path):
    cfg, tree = load_hf_folder(llm_folder(tmp_path / "llm", dtype=BFLOAT16))
    tensors = random_tensors(names.decoder_part(LLM), dtype=BFLOAT16)
    assert cfg == LLM and tree["embed"].dtype == BFLOAT16
    assert_same_bits(leaves(tree), leaves(convert.load_decoder(tensors, LLM)))
    cfg, tree = load_hf_folder(vision_folder(tmp_path / "vision"))
    assert cfg == TOWER
    assert_same_bits(convert.vision_tensors(tree, TOWER), read_folder(tmp_path / "vision"))


def test_a_multimodal_folder_must_be_asked_for_a_part(tmp_path):
    path = llm_folder(tmp_path / "llm")
    text = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({"model_type": "llava", "text_config": text, "vision_config": {}})
    )
    with pytest.raises(WeightsError, match="holds a decoder and a vision tower; name the part"):
        load_hf_folder(path)
    assert load_hf_folder(path, "decoder")[0] == LLM


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "model.ckpt"])
def test_pickles_are_refused_unopened(tmp_path, name):
    """Opening this one would write a file."""

    class Trap:
        def __reduce__(self):
            return pathlib.Path.touch, (tmp_path / "sprung",)

    path = tmp_path / name
    path.write_bytes(pickle.dumps(Trap()))
    for where in (tmp_path, path):
        with pytest.raises(WeightsError, match=r"never loaded, because .*code.*save_pretrained"):
            folder.Folder(where)
    assert not (tmp_path / "sprung").exists()


def test_a_pickle_beside_safetensors_is_ignored(tmp_path):
    path = llm_folder(tmp_path / "llm")
    (path / "pytorch_model.bin").write_bytes(b"not read")
    assert folder.Folder(path)


@pytest.mark.parametrize("cut", [3, 100, -5])
def test_a_shard_that_is_cut_off(sharded, cut):
    shard = sharded / SHARD
    shard.write_bytes(shard.read_bytes()[:cut])
    with pytest.raises(WeightsError, match=rf"{SHARD}: .*cut off"):
        folder.Folder(sharded)


def test_a_shard_with_bytes_behind_its_end(sharded):
    with (sharded / SHARD).open("ab") as f:
        f.write(b"more")
    with pytest.raises(WeightsError, match=rf"{SHARD}: too long: .* its header promises"):
        folder.Folder(sharded)


@pytest.mark.parametrize(
    "header",
    [
        b"[1, 2]",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b"{broken",
        b'{"a": {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [4, 4]}}',
        b'{"a": {"dtype": "ODD", "shape": [1], "data_offsets": [0, 1]},'
        b' "b": {"dtype": "ODD", "shape": [1], "data_offsets": [2, 4]}}',
    ],
)
def test_a_damaged_header(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + b"\0" * 4
    )
    with pytest.raises(WeightsError, match=r"model\.safetensors: "):
        folder.Folder(tmp_path)


@pytest.mark.parametrize(
    ("offsets", "fault"),
    [
        (((0, 4), (0, 4), (4, 8)), r"b, bytes 0 to 4, overlaps a, which ends at 4"),
        (((0, 4), (2, 6), (6, 8)), r"b, bytes 2 to 6, overlaps a"),
        (((0, 4), (8, 12), (12, 16)), r"b, bytes 8 to 12, leaves a gap after a, which ends at 4"),
        (((4, 8), (8, 12), (12, 16)), r"a, bytes 4 to 8, leaves a gap after the start"),
    ],
)
def test_tensors_that_overlap_or_leave_gaps(tmp_path, offsets, fault):
    header = {
        name: {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}
        for name, (begin, end) in zip("abc", offsets, strict=True)
    }
    text = json.dumps(header).encode()
    size = max(end for _, end in offsets)
    (tmp_path / "model.safetensors").write_bytes(
        len(text).to_bytes(8, "little") + text + b"\0" * size
    )
    with pytest.raises(WeightsError, match=fault):
        folder.Folder(tmp_path)


def test_one_file_beside_an_index_of_others(sharded, tmp_path):
    """transformers would read the file, an index says the shards: nobody knows which is meant."""
    other = llm_folder(tmp_path / "other", seed=5) / "model.safetensors"
    (sharded / "model.safetensors").write_bytes(other.read_bytes())
    with pytest.raises(WeightsError, match=rf"holds model\.safetensors, and {INDEX}, .* remove"):
        folder.Folder(sharded)
    names_ = folder.Folder(other.parent)
    index = {"weight_map": dict.fromkeys(names_, "model.safetensors")}
    (other.parent / INDEX).write_text(json.dumps(index))
    assert folder.Folder(other.parent).keys() == names_.keys()


@pytest.mark.parametrize("kinds", [(np.float16, BFLOAT16), (np.float32, np.float16, BFLOAT16)])
def test_blocks_of_several_dtypes_become_float32(tmp_path, kinds):
    name = "model.layers.{}.self_attn.q_proj.weight"

    def change(tensors):
        for i in range(LLM.depth):
            tensors[name.format(i)] = tensors[name.format(i)].astype(kinds[i % len(kinds)])

    path = llm_folder(tmp_path / "llm", change=change)
    kernel = np.asarray(load_hf_folder(path)[1]["blocks"]["attn"]["q"]["kernel"])
    assert kernel.dtype == np.float32
    stored = read_folder(path)
    for i in range(LLM.depth):
        np.testing.assert_array_equal(kernel[i], stored[name.format(i)].astype(np.float32).T)


def test_a_tied_head_is_compared_by_its_bits(tmp_path):
    cfg = dataclasses.replace(LLM, tied_head=True)

    def same(tensors):
        tensors["model.embed_tokens.weight"][3, 4] = np.nan
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    def other(tensors):
        same(tensors)
        tensors["lm_head.weight"][3, 4] = -np.nan

    assert load_hf_folder(llm_folder(tmp_path / "same", cfg, change=same))[0] == cfg
    with pytest.raises(WeightsError, match=r"lm_head\.weight differs from .*but the config ties"):
        load_hf_folder(llm_folder(tmp_path / "other", cfg, change=other))


def test_an_index_that_names_an_absent_file(sharded):
    (sharded / SHARD).unlink()
    with pytest.raises(WeightsError, match=rf"1 of 3 files are not there: {SHARD}"):
        folder.Folder(sharded)


def test_an_index_that_names_a_file_elsewhere(sharded):
    edit_index(sharded, lambda m: m.update({"model.norm.weight": "../other.safetensors"}))
    with pytest.raises(WeightsError, match="names files outside the folder"):
        folder.Folder(sharded)


def test_an_index_that_disagrees_with_the_shards(sharded):
    edit_index(sharded, lambda m: m.update({"more.weight": SHARD}))
    with pytest.raises(WeightsError, match=f"more.weight: in the index, but not in {SHARD}"):
        folder.Folder(sharded)
    edit_index(sharded, lambda m: [m.pop("more.weight"), m.pop("model.norm.weight")])
    with pytest.raises(WeightsError, match=r"model\.norm\.weight: not in the index"):
        folder.Folder(sharded)


def test_a_tensor_in_two_shards(sharded):
    first = sharded / "model-00001-of-00003.safetensors"
    with safe_open(first, "np") as f:
        tensors = {name: f.get_tensor(name) for name in f.keys()}  # noqa: SIM118
    with safe_open(sharded / SHARD, "np") as f:
        name = sorted(f.keys())[0]
        tensors[name] = f.get_tensor(name)
    save_file(tensors, first)
    with pytest.raises(WeightsError, match=f"{name}: in {first.name} and in {SHARD}"):
        folder.Folder(sharded)


def test_folders_without_weights(tmp_path):
    with pytest.raises(WeightsError, match="no such folder"):
        folder.Folder(tmp_path / "none")
    with pytest.raises(WeightsError, match="holds no safetensors file"):
        folder.Folder(tmp_path)
    path = llm_folder(tmp_path / "llm", shards=2)
    (path / INDEX).unlink()
    with pytest.raises(WeightsError, match=f"2 safetensors files and no {INDEX}"):
        folder.Folder(path)


def test_quantised_weights(tmp_path):
    def change(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)

    with pytest.raises(
        WeightsError, match=r"1 weights are not of F32, F16, BF16: model\.norm\.weight: I8"
    ):
        load_hf_folder(llm_folder(tmp_path / "llm", change=change))


@pytest.mark.parametrize("text", ["{broken", "[]"])
def test_a_config_that_is_none(tmp_path, text):
    path = llm_folder(tmp_path / "llm")
    (path / "config.json").write_text(text)
    with pytest.raises(WeightsError, match=r"config\.json: "):
        folder.Folder(path)
    (path / "config.json").unlink()
    with pytest.raises(WeightsError, match=r"no config\.json"):
        load_hf_folder(path)


def test_writing_out_of_order(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        "b": rng.normal(size=(3, 5)).astype(BFLOAT16),
        "a.0": rng.normal(size=7).astype(np.float32),
        "scalar": np.array(2, np.float16),
    }
    described = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    with contextlib.closing(Writer(tmp_path / "model.safetensors", described)) as writer:
        for name in reversed(list(tensors)):
            writer.write(name, tensors[name])
        with pytest.raises(ValueError, match="b: 4 bytes, 30 expected"):
            writer.write("b", np.zeros(1, np.float32))
    assert_same_bits(read_folder(tmp_path), tensors)


@pytest.mark.parametrize(("limit", "files"), [(10**6, 1), (170, 3), (1, 4)])
def test_shards(tmp_path, limit, files):
    tensors = {f"t{i}": np.full((20 if i else 50,), i, np.float32) for i in range(4)}
    described = {name: (x.shape, x.dtype) for name, x in tensors.items()}
    writer = ShardWriter(tmp_path, described, limit)
    for name, x in tensors.items():
        writer.write(name, x)
    writer.close()
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    assert (tmp_path / INDEX).exists() == (files > 1)
    assert_same_bits(read_folder(tmp_path), tensors)
    assert_same_bits(dict(folder.Folder(tmp_path)), tensors)
