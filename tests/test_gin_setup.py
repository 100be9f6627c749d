"""Gin files and bindings: every file of the repository, the quickstart on record, and mistakes."""

import dataclasses
import pathlib
import re
import shlex

import gin
import pytest
from model_helpers import golden

from bluelm_jax import presets, schemes
from bluelm_jax.run_config import RunConfig
from experiments import ablation, evaluation, gin_setup, quickstart_config
from export import gin_setup as export_setup  # noqa: F401 (registers)
from export.config import ExportConfig
from gin_configs import binding
from gin_configs.binding import ConfigError

ROOT = pathlib.Path(__file__).parent.parent
TINY_GIN = str(ROOT / "tests" / "testdata" / "tiny.gin")
# What each command builds from its gin files.
ROOTS = {
    "experiments.train": RunConfig,
    "experiments.ablate": ablation.Ablation,
    "experiments.quickstart": quickstart_config.Quickstart,
    "experiments.evaluate": evaluation.EvalConfig,
    "experiments.import_weights": RunConfig,
}
# Files that a command reads before those of its command line.
ALWAYS = {"experiments.import_weights": ["gin_configs/weights/import.gin"]}
FILES = sorted(p.relative_to(ROOT).as_posix() for p in (ROOT / "gin_configs").rglob("*.gin"))


def documented_command(path):
    """(module, gin files, bindings) of the command that a gin file opens with."""
    lines = (ROOT / path).read_text().splitlines()
    comment = []
    for line in lines:
        if not line.startswith("# "):
            break
        comment.append(line[2:])
    start = next(i for i, line in enumerate(comment) if line.startswith("python -m "))
    stop = start
    while comment[stop].endswith("\\"):
        stop += 1
    words = shlex.split(" ".join(line.rstrip("\\") for line in comment[start : stop + 1]))
    files = [w.removeprefix("--gin_file=") for w in words if w.startswith("--gin_file=")]
    bound = [w.removeprefix("--gin_bindings=") for w in words if w.startswith("--gin_bindings=")]
    return words[2], files, bound


def with_includes(path):
    """A gin file and what it includes, by the names they have in the repository."""
    included = re.findall(r"^include '(.+)'", (ROOT / path).read_text(), re.MULTILINE)
    return {path}.union(*(with_includes(inner) for inner in included))


def build(root, *bindings, files=(TINY_GIN,)):
    return binding.build(root, files, bindings)


# The repository's files ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", FILES)
def test_the_command_of_every_gin_file_builds(path):
    module, files, bindings = documented_command(path)
    files = ALWAYS.get(module, []) + files
    reached = set().union(*(with_includes(each) for each in files))
    assert path in reached, f"the command at the top of {path} does not read it"
    if module.startswith("export."):
        assert binding.build(ExportConfig, files, bindings)
        return
    built = build(ROOTS[module], *bindings, files=files)
    assert isinstance(built, ROOTS[module])


@pytest.mark.parametrize("path", [p for p in FILES if "/train/" in p])
def test_paths_left_open_must_be_bound(path):
    _, files, _ = documented_command(path)
    with pytest.raises(ConfigError, match="path"):
        build(RunConfig, files=files)


def test_stages_have_the_papers_numbers():
    """Tables 7 and 8 of the paper."""
    stages = []
    for n in (1, 2):
        _, files, bindings = documented_command(f"gin_configs/train/bluelm_v_stage{n}.gin")
        stages.append(build(RunConfig, *bindings, files=files))
    one, two = stages
    assert one.train.trainable == ("downsampler", "projector")
    assert set(two.train.trainable) == {"vision", "downsampler", "projector", "decoder"}
    assert isinstance(one.data.tiling.scheme, schemes.Fixed)
    assert two.data.tiling.scheme.alpha == 0.1
    assert set(two.data.tiling.scheme.grids) == set(schemes.GRIDS_4X4)
    steps = [(r.train.steps, r.train.optim.warmup_steps, r.data.batch_size) for r in stages]
    assert steps == [(3434, 34, 720), (131_000, 1310, 5760)]
    assert [r.train.optim.peak_lr for r in stages] == [1e-3, 1e-4]
    assert [r.train.optim.vision_layer_decay for r in stages] == [1.0, 0.9]
    for run in stages:
        optim = run.train.optim
        assert (optim.b1, optim.b2, optim.eps, optim.weight_decay) == (0.9, 0.98, 1e-6, 0.05)
        assert run.data.seq_len == 4096 and run.model.dtype == "bfloat16"
        assert run.model.decoder == presets.minicpm_2b()


def test_schemes_differ_in_nothing_but_the_grid():
    module, files, bindings = documented_command("gin_configs/ablations/llava_schemes.gin")
    plan = build(ROOTS[module], *bindings, files=files)
    assert [v.name for v in plan.variants] == ["llava_next", "internvl_15", "relaxed"]
    kinds = {type(v.tiling.scheme) for v in plan.variants}
    assert kinds == {schemes.LlavaNext, schemes.InternVL15, schemes.Relaxed}
    rest = {dataclasses.replace(v.tiling, scheme=schemes.Fixed()) for v in plan.variants}
    assert len(rest) == 1


def test_quickstart_is_the_one_on_record():
    """The resolved quickstart, defaults included, as the command writes it."""
    build(quickstart_config.Quickstart, files=["gin_configs/quickstart.gin"])
    text = binding.resolved()
    assert text == golden("quickstart_resolved.gin", text), (
        "the quickstart resolves to another config than the one on record. If that is meant, say in "
        "the commit message why, and store it with\n"
        "UPDATE_GOLDEN=1 make test-one T=tests/test_gin_setup.py"
    )


@pytest.mark.parametrize(
    "path", ["gin_configs/quickstart.gin", *[p for p in FILES if "/train/" in p]]
)
def test_the_resolved_config_builds_the_same(path, tmp_path):
    """config.gin of a run directory is itself a gin file for the same run."""
    module, files, bindings = documented_command(path)
    built = build(ROOTS[module], *bindings, files=files)
    resolved = tmp_path / "config.gin"
    resolved.write_text(binding.resolved())
    assert build(ROOTS[module], files=[str(resolved)]) == built


# Building --------------------------------------------------------------------------------------------


def test_a_tiny_run():
    run = build(RunConfig)
    assert type(run) is RunConfig and type(run.data.tiling.scheme) is schemes.Fixed
    assert run.data.sources[0].path == "stage1_train.json"
    assert run.train.optim.warmup_steps == 1 and run.train.accumulation == 1


def test_bindings_win_over_files_and_later_files_over_earlier(tmp_path):
    later = tmp_path / "later.gin"
    later.write_text("TrainConfig.steps = 7\nTrainConfig.seed = 3\n")
    run = build(RunConfig, "TrainConfig.seed = 5", files=[TINY_GIN, str(later)])
    assert (run.train.steps, run.train.seed) == (7, 5)


def test_builds_do_not_leak_into_each_other():
    build(RunConfig, "TrainConfig.seed = 5")
    assert build(RunConfig).train.seed == 0


def test_files_are_found_from_the_repository(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = "gin_configs/quickstart.gin"
    assert build(quickstart_config.Quickstart, files=[path]).subject == "relaxed"


def test_scoped_bindings_reach_their_own_object_only():
    run = build(
        RunConfig,
        "TrainConfig.optim = @slow/OptimConfig()",
        "slow/OptimConfig.peak_lr = 1e-5",
        "OptimConfig.eps = 1e-4",
    )
    assert (run.train.optim.peak_lr, run.train.optim.eps) == (1e-5, 1e-4)


# Mistakes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        # Names that are not there.
        (["TrainConfg.steps = 3"], r"TrainConfg(.|\n)*did you mean TrainConfig"),
        (["TrainConfig.stepz = 3"], "stepz"),
        (["DataConfig.tiling = @Tilling()"], r"Tilling(.|\n)*did you mean Tiling"),
        (["VisionConfig.tile_size = %tile_sise"], "tile_sise"),
        # What gin itself accepts in silence.
        (["tile_sise = 56"], r"read by nothing: %tile_sise \("),
        (["stage3/OptimConfig.peak_lr = 1.0"], r"read by nothing: stage3/OptimConfig.peak_lr \("),
        (["MeshConfig.fsdp = 2"], r"read by nothing: MeshConfig.fsdp \("),
        (["Relaxed.alpha = 0.2", "a/Packing.lookahead = 1"], "a/Packing.lookahead, .*Relaxed.alpha|"
         "Relaxed.alpha, a/Packing.lookahead"),
        # Values.
        (["TrainConfig.steps = 0"], r"TrainConfig.steps = 0: must be > "),
        (["TrainConfig.steps = 1e3"], r"TrainConfig.steps = 1000.0: must be of type int"),
        (["TrainConfig.steps = True"], r"TrainConfig.steps = True: must be of type int"),
        (["OptimConfig.peak_lr = '1e-3'"], r"OptimConfig.peak_lr = '1e-3': must be of type float"),
        (["DataConfig.shuffle = 'no'"], r"DataConfig.shuffle = 'no': must be of type bool"),
        (["DataConfig.seq_len = 999"], "data.seq_len = 999 exceeds model.decoder.max_length = 128"),
        (["DataConfig.packing = True"], "DataConfig.packing = True: must be of type"),
        (["DataConfig.packing = @Packing"], r"DataConfig.packing = .*write @Name\(\) with paren"),
        (["DataConfig.layout = 'plain'"], "DataConfig.layout = 'plain': must be of type Plain or"),
        (["DataConfig.sources = @SourceConfig()"], "DataConfig.sources = SourceConfig.*of type tup"),
        (["SourceConfig.image_root = None"], "SourceConfig.image_root = None: must be of type str"),
        (["stage1/TrainConfig.steps = 5", "RunConfig.train = @stage1/TrainConfig()"],
         r"read by nothing: TrainConfig.steps .*; bind stage1/TrainConfig.steps"),
        # Syntax.
        (["TrainConfig.steps"], r"--gin_bindings: .* \(TrainConfig.steps\)$"),
        (["TrainConfig.seed = 1", "TrainConfig.steps = "], r"\(TrainConfig.seed = 1; TrainConfig.s"),
        (["TrainConfig.trainable = ('decoder',"], r"--gin_bindings: .* \(TrainConfig.trainable"),
    ],
)  # fmt: skip
def test_mistakes_are_named(bindings, message):
    with pytest.raises(ConfigError, match=message):
        build(RunConfig, *bindings)


def test_numbers_may_be_whole_where_fractions_are_allowed():
    run = build(RunConfig, "OptimConfig.peak_lr = 1", "OptimConfig.clip_norm = None")
    assert run.train.optim.peak_lr == 1 and run.train.optim.clip_norm is None


def test_a_value_that_is_missing(tmp_path):
    text = pathlib.Path(TINY_GIN).read_text()
    for line, name in (
        ("TrainConfig.steps = 4\n", "steps"),
        ("RunConfig.train = @TrainConfig()\n", "train"),
        ("Tiling.scheme = @Fixed()\n", "scheme"),
    ):
        assert line in text
        path = tmp_path / "broken.gin"
        path.write_text(text.replace(line, ""))
        with pytest.raises(ConfigError, match=rf"'{name}'(.|\n)*bind it in the gin file or with"):
            build(RunConfig, files=[str(path)])


def test_a_file_that_is_missing():
    with pytest.raises(ConfigError, match=r"--gin_file=gin_configs/quickstrat.gin: no such file"):
        build(RunConfig, files=["gin_configs/quickstrat.gin"])


def test_a_syntax_error_names_file_and_line(tmp_path):
    path = tmp_path / "a.gin"
    path.write_text("tile_size = 3\nTrainConfig.steps = \n")
    with pytest.raises(ConfigError, match=r"a.gin, line 2: "):
        build(RunConfig, files=[str(path)])


def test_an_included_file_that_is_missing(tmp_path):
    path = tmp_path / "a.gin"
    path.write_text("include 'gin_configs/none.gin'\n")
    with pytest.raises(ConfigError, match=r"none.gin"):
        build(RunConfig, files=[str(path)])


def test_no_file_at_all_names_one():
    with pytest.raises(ConfigError, match=r"^no --gin_file .*=gin_configs/train/\S+\.gin$"):
        build(RunConfig, files=())
    with pytest.raises(ConfigError, match=r"(?s)^no --gin_file.*alone leave out: .*'vision'"):
        build(RunConfig, "RunConfig.model = @VLMConfig()", files=())
    assert all((ROOT / path).is_file() for path in binding._EXAMPLES.values())


def test_required_in_a_file_names_what_to_bind(tmp_path):
    path = tmp_path / "a.gin"
    path.write_text(f"include '{TINY_GIN}'\nSourceConfig.path = %gin.REQUIRED\n")
    with pytest.raises(ConfigError, match="path"):
        build(RunConfig, files=[str(path)])
    assert (
        build(RunConfig, "SourceConfig.path = 'x'", files=[str(path)]).data.sources[0].path == "x"
    )


# What holds `unused_bindings` to gin's behaviour -----------------------------------------------------


def test_unused_bindings_and_scopes():
    build(RunConfig)
    assert binding.unused_bindings() == []
    gin.clear_config()
    gin.parse_config(["OptimConfig.eps = 1.0", "a/OptimConfig.b1 = 0.5", "b/OptimConfig.b1 = 0.5"])
    with gin.config_scope("a/inner"):
        made = gin.get_configurable("OptimConfig")()
    assert (made.eps, made.b1) == (1.0, 0.5)
    assert binding.unused_bindings() == ["b/OptimConfig.b1"]


def test_describe_is_an_outline():
    lines = gin_setup.describe(build(RunConfig)).splitlines()
    assert lines[0] == "model: VLMConfig" and "  vision: VisionConfig" in lines
    assert "    tile_size = 28" in lines and "  steps = 4" in lines
    assert "    scheme: Fixed" in lines
