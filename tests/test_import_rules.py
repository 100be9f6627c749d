"""Holds the one-way order of imports, read from the syntax tree, wherever an import stands.

Imports inside functions and under TYPE_CHECKING count too: the order says what a module may know
about, not only what it loads first. `check_tree` takes any root, so that the rules themselves are
tested on small trees that break them.
"""

import ast
import dataclasses
import graphlib
import pathlib
import textwrap

import pytest

ROOT = pathlib.Path(__file__).parent.parent
LIBRARY = "bluelm_jax"
PROGRAMS = ("experiments", "export")
THIS_FILE = "tests/test_import_rules.py"

# What each module of the library imports directly. It may also import what those may import.
# The packages data and evals are one entry each; within one, anything but a cycle.
DIRECT = {
    "__init__": (),
    "schemes": ("checks",),
    "checks": (),
    "downsampler_config": ("checks",),
    "config": ("schemes", "downsampler_config"),
    "presets": ("config",),
    "data_config": ("schemes", "config"),
    "aspect_ratio": ("schemes",),
    "aspect_ratio_vectorized": ("aspect_ratio",),
    "resample_numba": (),
    "resample": ("schemes", "resample_numba"),
    "patching": ("aspect_ratio", "resample"),
    "bilinear": (),
    "layout": ("config", "aspect_ratio", "bilinear"),
    "layout_vectorized": ("aspect_ratio_vectorized", "layout"),
    "batch": ("layout",),
    "data": ("data_config", "patching", "layout", "files"),
    "sharding": ("config",),
    "params": ("sharding",),
    "rotary": (),
    "layers": ("params", "rotary"),
    "vision": ("layers",),
    "downsample": ("layers",),
    "decoder": ("layers",),
    "vlm": ("vision", "downsample", "decoder", "batch"),
    "flax_modules": ("vlm",),
    "decoding": ("decoder",),
    "sampling_config": ("checks",),
    "sampling": ("sampling_config",),
    "steps": ("decoder", "sampling"),
    "generate": ("vlm", "decoding", "steps"),
    "chat_engine": ("generate", "data"),
    "chat": ("chat_engine", "run_config"),
    "chat_session": ("chat",),
    "loss": ("decoder", "batch"),
    "optim": ("params",),
    "run_config": ("data_config", "layout"),
    "objective": ("vlm", "loss", "run_config"),
    "flops": ("objective", "optim"),
    "serialize": ("run_config",),
    "files": (),
    "metrics_log": ("files",),
    "interrupt": (),
    "checkpoint_stream": (),
    "checkpoints": ("params", "checkpoint_stream"),
    "train_state": ("vlm", "optim", "checkpoints", "run_config"),
    "prefetch": ("batch", "data"),
    "data_states": ("data",),
    "train": (
        "train_state",
        "objective",
        "prefetch",
        "data_states",
        "serialize",
        "metrics_log",
        "interrupt",
        "files",
    ),
    "evals": ("generate", "data"),
    "weights": ("vlm", "checkpoints", "serialize", "data", "presets"),
    "run_folder": ("vlm", "checkpoints", "serialize"),
    "api": ("chat_session", "run_folder", "weights"),
}

# Third-party packages that have no place in the library, and why.
BANNED = {
    "gin": "gin stays in experiments",
    "tensorflow": "TensorFlow stays in export",
    "keras": "Keras stays out",
    "torch": "torch stays in parity tests",
    "transformers": "transformers stays in parity tests",
    "ai_edge_litert": "LiteRT stays in export",
    "ai_edge_quantizer": "the quantiser stays in export",
    "jax.experimental.jax2tf": "lowering stays in export",
}
# A data worker must start fast and must not take a device, so nothing it loads may bring JAX.
JAX_STACK = ("jax", "jaxlib", "flax", "optax", "orbax", "chex")


@dataclasses.dataclass(frozen=True)
class Import:
    """One imported name: `target` is the module, as far down as there are files for it."""

    path: str
    line: int
    source: str
    target: str

    def says(self, rule):
        return f"{self.path}:{self.line} imports {self.target}: {rule}"


def allowed_modules():
    """The transitive closure of DIRECT; raises CycleError where the table itself has a cycle."""
    closure = {}
    for unit in graphlib.TopologicalSorter(DIRECT).static_order():
        closure[unit] = set(DIRECT[unit]).union(*(closure[below] for below in DIRECT[unit]))
    return closure


def module_name(path):
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module):
    """The row of the table: 'data' for bluelm_jax.data.packing, '__init__' for bluelm_jax."""
    return [*module.split("."), "__init__"][1]


def inside(module, package):
    return module == package or module.startswith(package + ".")


def parse_tree(root):
    """Every module under the three packages with its imports: ({name: path}, [Import])."""
    files = {
        module_name(path.relative_to(root)): path
        for package in (LIBRARY, *PROGRAMS)
        for path in sorted((root / package).rglob("*.py"))
    }
    imports = []
    for module, path in files.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            for target in targets_of(node, package, files):
                where = path.relative_to(root).as_posix()
                imports.append(Import(where, node.lineno, module, target))
    return files, imports


def targets_of(node, package, files):
    """Modules that one import statement names; `from a import b` is a.b where that is a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = node.module or ""
    if node.level:
        above = package.split(".")[: len(package.split(".")) - node.level + 1]
        base = ".".join([*above, base] if base else above)
    own = base.split(".")[0] in (LIBRARY, *PROGRAMS, "tests")
    names = [f"{base}.{alias.name}" for alias in node.names]
    return [name if name in files or not own else base for name in names]


def check_tree(root):
    """All broken rules under `root`, one message each."""
    files, imports = parse_tree(root)
    problems = [
        f"{path.relative_to(root)}:1 is not in DIRECT of {THIS_FILE}: say what it may import"
        for module, path in files.items()
        if inside(module, LIBRARY) and unit_of(module) not in DIRECT
    ]
    for found in imports:
        problems += [found.says(rule) for rule in broken_rules(found)]
    return problems + jax_in_workers(files, imports) + cycles(imports, files)


def broken_rules(found):
    package = found.source.split(".")[0]
    if inside(found.target, "tests"):
        yield "nothing imports tests"
    if package in PROGRAMS:
        other = PROGRAMS[1 - PROGRAMS.index(package)]
        if inside(found.target, other):
            yield f"{package} and {other} never import each other"
        return
    for program in PROGRAMS:
        if inside(found.target, program):
            yield f"{program} imports the library, never the reverse"
    for name, reason in BANNED.items():
        if inside(found.target, name):
            yield reason
    unit = unit_of(found.source)
    if inside(found.target, "orbax") and unit not in ("checkpoints", "checkpoint_stream"):
        yield "only checkpoints.py knows orbax"
    if inside(found.target, LIBRARY) and unit in DIRECT:
        wanted = unit_of(found.target)
        if wanted not in {unit, "__init__"} | allowed_modules()[unit]:
            yield f"{unit} may import {', '.join(sorted(allowed_modules()[unit])) or 'nothing'}"


def jax_in_workers(files, imports):
    """JAX in bluelm_jax.data or in anything that it loads, parent packages included."""
    reached = {}
    queue = [(module, module) for module in files if inside(module, f"{LIBRARY}.data")]
    while queue:
        module, origin = queue.pop()
        if module not in files or module in reached:
            continue
        reached[module] = origin
        queue.append((module.rpartition(".")[0], origin))
        queue += [(found.target, origin) for found in imports if found.source == module]
    return [
        found.says(f"data workers load this module (from {reached[found.source]}): no JAX here")
        for found in imports
        if found.source in reached and any(inside(found.target, name) for name in JAX_STACK)
    ]


def cycles(imports, files):
    graph = {module: set() for module in files}
    for found in imports:
        if found.target in files and found.target != found.source:
            graph[found.source].add(found.target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [f"modules import each other in a circle: {' <- '.join(error.args[1])}"]
    return []


def write_tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(textwrap.dedent(text))


def test_repository_follows_the_rules():
    files, imports = parse_tree(ROOT)
    assert f"{LIBRARY}.config" in files and len(imports) > 50, "the library was not found"
    problems = check_tree(ROOT)
    assert not problems, "\n" + "\n".join(problems)


def test_every_row_of_the_table_is_a_module():
    files, _ = parse_tree(ROOT)
    stale = set(DIRECT) - {unit_of(module) for module in files if inside(module, LIBRARY)}
    assert not stale, f"rows of DIRECT without a module: {sorted(stale)}"


def test_table_names_only_rows():
    assert {below for row in DIRECT.values() for below in row} <= set(DIRECT)
    assert "data" in allowed_modules()["train"] and "schemes" in allowed_modules()["train"]
    assert "batch" not in allowed_modules()["data"], "batch.py imports JAX"


# What breaks a rule: the file, its code, and words of the message.
BREACHES = {
    "order": ("config.py", "from bluelm_jax import vlm", "config may import checks, downs"),
    "relative": ("schemes.py", "from .config import A", "schemes may import checks"),
    "package": ("data/pack.py", "import bluelm_jax.train", "data may import"),
    "gin": ("train.py", "def f():\n    import gin", "gin stays in experiments"),
    "jax2tf": ("vlm.py", "from jax.experimental import jax2tf", "lowering stays"),
    "tensorflow": ("train.py", "import tensorflow as tf", "TensorFlow stays in export"),
    "torch": ("vlm.py", "from torch import nn", "torch stays in parity tests"),
    "orbax": ("train.py", "import orbax.checkpoint as ocp", "only checkpoints.py"),
    "upward": ("vlm.py", "from experiments import train", "never the reverse"),
    "sideways": ("../experiments/a.py", "import export.lower", "never import each other"),
    "sideways back": ("../export/a.py", "from experiments.b import c", "never import each other"),
    "tests": ("../experiments/a.py", "from tests import conftest", "nothing imports tests"),
    "jax in data": ("data/a.py", "import jax.numpy as jnp", "no JAX here"),
    "jax below data": ("patching.py", "import flax.struct", "no JAX here"),
    "jax above data": ("__init__.py", "import jax", "no JAX here"),
    "unlisted": ("extra.py", "import math", "is not in DIRECT"),
}


@pytest.mark.parametrize("name", BREACHES)
def test_breach_is_reported(name, tmp_path):
    path, code, message = BREACHES[name]
    library = tmp_path / LIBRARY
    units = {f"{unit}.py": "" for unit in DIRECT if unit != "data"}
    write_tree(library, units | {"data/__init__.py": "from bluelm_jax import patching"})
    write_tree(tmp_path / "export", {"lower.py": ""})
    assert check_tree(tmp_path) == []
    write_tree(library, {path: code})
    (problem,) = check_tree(tmp_path)
    where = (library / path).resolve().relative_to(tmp_path.resolve()).as_posix()
    assert problem.startswith(f"{where}:") and message in problem


def test_circle_within_a_package_is_reported(tmp_path):
    write_tree(
        tmp_path,
        {
            "bluelm_jax/data/__init__.py": "",
            "bluelm_jax/data/a.py": "from bluelm_jax.data import b",
            "bluelm_jax/data/b.py": "def late():\n    from . import a",
        },
    )
    (problem,) = check_tree(tmp_path)
    assert "circle" in problem and "bluelm_jax.data.a" in problem
