"""Model folders into run folders and back: what is written, and what an interruption leaves."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from model_helpers import make_run
from weights_helpers import (
    BFLOAT16,
    LLM,
    MODEL,
    RUN,
    TOWER,
    assert_same_bits,
    leaves,
    llm_folder,
    make,
    read_folder,
    restored,
    sources,
    vision_folder,
)

from bluelm_jax import checkpoints, config, params, serialize, sharding, train_state, vision, vlm
from bluelm_jax.weights import (
    WeightsError,
    convert,
    importing,
    model_config,
    stream,
)
from bluelm_jax.weights.importing import Sources

DRAWN = ("projector", "downsampler", "newline")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return {
        "llm": llm_folder(root / "llm", shards=3, dtype=BFLOAT16),
        "vision": vision_folder(root / "vision"),
    }


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that each tensor goes in several pieces, the last one smaller."""
    monkeypatch.setattr(stream, "BLOCK_BYTES", 700)


@pytest.fixture(scope="module")
def imported(folders, tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "imported"
    make(out, RUN, sources(folders))
    return out


def test_weights_are_those_of_the_folders(imported, folders):
    tree = restored(imported, vlm.specs(MODEL), BFLOAT16)
    llm = convert.decoder_tensors(tree["decoder"], LLM)
    assert_same_bits(llm, read_folder(folders["llm"]))
    tree = restored(imported, vlm.specs(MODEL))
    assert_same_bits(convert.vision_tensors(tree["vision"], TOWER), read_folder(folders["vision"]))


def test_dtypes_are_kept_and_restored_as_float32(imported):
    stored = checkpoints.stored_params(imported)
    kinds = {path.split("/")[0]: set() for path in stored}
    for path, leaf in stored.items():
        kinds[path.split("/")[0]].add(np.dtype(leaf.dtype))
    single = {np.dtype(np.float32)}
    assert kinds.pop("decoder") == {BFLOAT16} and all(found == single for found in kinds.values())
    tree = restored(imported, vlm.specs(MODEL))
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == single


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 4, 1)])
def test_restores_on_any_mesh(imported, shape):
    names_ = ("data", "fsdp", "tensor")
    cfg = config.MeshConfig(**dict(zip(names_, shape, strict=True)))
    mesh = sharding.make_mesh(cfg, jax.devices()[: np.prod(shape)])
    placed = restored(imported, vlm.specs(MODEL), mesh=mesh)
    assert_same_bits(leaves(placed), leaves(restored(imported, vlm.specs(MODEL))))
    up = placed["decoder"]["blocks"]["mlp"]["up"]["kernel"]
    assert up.sharding.shard_shape(up.shape) == (3, 16 // shape[1], 24 // shape[2])


def test_the_rest_is_what_the_seed_draws(imported):
    rest = {name: tree for name, tree in vlm.specs(MODEL).items() if name in DRAWN}
    drawn = params.init(rest, jax.random.key(0))
    tree = restored(imported, vlm.specs(MODEL))
    assert_same_bits(leaves({name: tree[name] for name in DRAWN}), leaves(drawn))
    told = json.loads((imported / "import.json").read_text())
    assert {name: part["from"] for name, part in told["parts"].items()} == {
        "vision": "imported", "downsampler": "drawn", "projector": "drawn", "decoder": "imported",
        "newline": "drawn",
    }  # fmt: skip
    assert told["seed"] == 0 and told["sources"]["llm"]["model_type"] == "llama"
    assert serialize.load_run_config(imported) == RUN


def test_training_starts_from_it(imported):
    """By the run folder or its checkpoints, as stage 1 does."""
    mesh = sharding.make_mesh(config.MeshConfig())
    for where in (imported, imported / "checkpoints"):
        run = make_run(model=MODEL, init_from=str(where), trainable=("projector", "downsampler"))
        state = train_state.first_state(run, mesh)
        assert_same_bits(leaves(state.params), leaves(restored(imported, vlm.specs(MODEL))))


def test_an_import_is_not_a_run_to_continue(imported):
    saver = checkpoints.Checkpointer(imported / "checkpoints")
    mesh = sharding.make_mesh(config.MeshConfig())
    with pytest.raises(checkpoints.CheckpointError, match="step: missing"):
        saver.restore(train_state.abstract_state(RUN, mesh))
    saver.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cast(folders, tmp_path, dtype):
    make(tmp_path / "out", RUN, sources(folders), dtype)
    wanted = importing.DTYPES[dtype]
    stored = checkpoints.stored_params(tmp_path / "out")
    assert {np.dtype(leaf.dtype) for leaf in stored.values()} == {wanted}
    tree = restored(tmp_path / "out", vlm.specs(MODEL), wanted)
    theirs = {k: x.astype(wanted) for k, x in read_folder(folders["vision"]).items()}
    assert_same_bits(convert.vision_tensors(tree["vision"], TOWER), theirs)


def test_one_part_alone(folders, tmp_path):
    report = make(tmp_path / "out", RUN, sources(folders, "llm"), seed=None)
    assert checkpoints.stored_parts(tmp_path / "out") == {"decoder"}
    assert report.parts["vision"] == (0, "absent") and report.parts["decoder"][1] == "imported"
    specs = {"decoder": vlm.specs(MODEL)["decoder"]}
    tree = restored(tmp_path / "out", specs, BFLOAT16)
    assert_same_bits(convert.decoder_tensors(tree["decoder"], LLM), read_folder(folders["llm"]))
    with pytest.raises(checkpoints.CheckpointError, match=r"vision/.*: missing"):
        restored(tmp_path / "out", vlm.specs(MODEL))


def test_positions_for_other_tiles_are_interpolated(folders, tmp_path):
    larger = dataclasses.replace(TOWER, tile_size=28)
    run = make_run(model=dataclasses.replace(MODEL, vision=larger))
    found = sources(folders, "vision")
    assert model_config.model_for(found, run.model) == run.model
    make(tmp_path / "out", run, found)
    table = restored(tmp_path / "out", vlm.specs(run.model))["vision"]["position"]
    stored = read_folder(folders["vision"])["vision_model.embeddings.position_embedding.weight"]
    assert_same_bits({"": np.asarray(table)}, {"": vision.resize_positions(stored, 7)})


def test_what_is_not_finite_is_counted(tmp_path):
    def change(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][3, :2] = np.nan, -np.inf
        tensors["model.norm.weight"][0] = np.inf

    folders = {"llm": llm_folder(tmp_path / "llm", change=change)}
    report = make(tmp_path / "out", RUN, sources(folders, "llm"), seed=None)
    assert report.not_finite == {"decoder/blocks/mlp/up/kernel": 2, "decoder/norm/scale": 1}
    for dtype in (np.float32, np.float16, BFLOAT16):
        x = np.array([1, np.nan, -np.inf, 0, -np.nan, 6e4, 1e-8], dtype)
        assert stream.count_not_finite(x) == 3


def test_everything_wrong_is_found_before_anything_is_written(tmp_path):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.extra"] = np.zeros(3, np.float32)

    found = sources({"llm": llm_folder(tmp_path / "llm", shards=2, change=change)}, "llm")
    with pytest.raises(WeightsError, match=r"llm: not this decoder, 1 missing, 1 unknown"):
        make(tmp_path / "out", RUN, found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llm"]


def test_a_tied_head_that_differs(tmp_path):
    tied = dataclasses.replace(LLM, tied_head=True)
    run = make_run(model=dataclasses.replace(MODEL, decoder=tied))

    def same(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    def other(tensors):
        same(tensors)
        tensors["lm_head.weight"][39, 15] += 1

    importing.prepare(run, sources({"llm": llm_folder(tmp_path / "a", tied, change=same)}, "llm"))
    found = sources({"llm": llm_folder(tmp_path / "b", tied, change=other)}, "llm")
    with pytest.raises(WeightsError, match=r"but config\.json ties them"):
        importing.prepare(run, found)


class Stop(Exception):
    pass


@pytest.mark.parametrize("error", [Stop, KeyboardInterrupt, OSError])
def test_an_interrupted_import_leaves_nothing(folders, tmp_path, error):
    def stop(done):
        if done > 5000:
            raise error("in the middle")

    with pytest.raises((error, checkpoints.CheckpointError), match="in the middle"):
        make(tmp_path / "out", RUN, sources(folders), progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_import_left_is_replaced(folders, tmp_path):
    left = tmp_path / "out.unfinished" / "checkpoints" / "0"
    left.mkdir(parents=True)
    assert checkpoints.latest_step(tmp_path / "out" / "checkpoints") is None
    make(tmp_path / "out", RUN, sources(folders))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_shard_that_shrinks_while_it_is_read(folders, tmp_path):
    copy = shutil.copytree(folders["llm"], tmp_path / "llm")
    prepared = importing.prepare(RUN, sources({"llm": copy}, "llm"))
    shard = copy / "model-00003-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-600])
    with pytest.raises(WeightsError, match=r"00003\.safetensors: ends \d+ bytes too early"):
        importing.write(tmp_path / "out", prepared)
    assert [path.name for path in tmp_path.iterdir()] == ["llm"]


def test_nothing_is_overwritten(imported, folders):
    with pytest.raises(WeightsError, match=f"{imported} exists: choose another folder"):
        make(imported, RUN, sources(folders))


def test_nothing_to_import():
    with pytest.raises(WeightsError, match="nothing to import"):
        importing.prepare(RUN, Sources())


def test_a_model_that_is_not_the_folders(folders):
    other = dataclasses.replace(
        MODEL, decoder=dataclasses.replace(LLM, mlp_dim=32, unroll=3, rope_theta=5.0)
    )
    with pytest.raises(WeightsError, match=r"mlp_dim: 24, the model has 32; rope_theta: 10000"):
        model_config.model_for(sources(folders), other)
    long = dataclasses.replace(MODEL, decoder=dataclasses.replace(LLM, max_length=65))
    with pytest.raises(WeightsError, match=r"max_length = 65, .* was made for 64"):
        model_config.model_for(sources(folders), long)
