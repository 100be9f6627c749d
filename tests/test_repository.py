"""What holds for the repository as a whole: its documents, its files' sizes, its requirements."""

import os
import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PROGRAM_CODE = ("bluelm_jax", "experiments", "export")
MAX_LINES = 300
# Files over MAX_LINES, each with the reason why splitting it would make it worse.
LONG_FILES: dict[str, str] = {}

# An absolute path into somebody's home or work directory. Paths under /tmp are anybody's.
MACHINE_PATH = re.compile(r"(?<![\w./:-])/(?:work|root|home|Users)/\w|\.\./shared\b")
COMMAND = re.compile(r"(?:^|[\s`;&(])(?:make (?P<target>[a-z][a-z-]*)|-m (?P<module>[\w.]+))")
COMMAND_LINE = re.compile(r"(\$ )?(make|python3?) |.*\.gin\b")  # Not prose such as "this makes".
GIN_PATH = re.compile(r"gin_configs/[\w/.-]+\.gin")


def repository_files():
    """Every file that is or could be committed; environments, caches and run outputs are not."""
    for folder, subfolders, names in os.walk(ROOT):
        here = pathlib.Path(folder)
        if here != ROOT and "pyvenv.cfg" in names:  # A virtual environment of any name.
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if not is_output(here, name))
        yield from (here / name for name in sorted(names) if not name.endswith(".pyc"))


def is_output(parent, name):
    top = parent == ROOT and name in ("runs", "build", "dist")
    hidden = name.startswith(".") and name not in (".ci", ".github")
    return top or hidden or name == "__pycache__" or name.endswith(".egg-info")


def relative(path):
    return path.relative_to(ROOT).as_posix()


def text_of(path):
    """The text of a file, or None where it is not UTF-8 text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def make_targets():
    return set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def unknown_commands(text):
    """Commands in `text` that cannot be run: make targets, own modules and gin files we lack."""
    unknown = []
    for found in COMMAND.finditer(text):
        target, module = found["target"], found["module"]
        if target and target not in make_targets():
            unknown.append(f"make {target}")
        if module and module.split(".")[0] in PROGRAM_CODE and not module_exists(module):
            unknown.append(f"python -m {module}")
    return unknown + [path for path in GIN_PATH.findall(text) if not (ROOT / path).is_file()]


def module_exists(module):
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__main__.py").is_file()


def code_in_markdown(text):
    """Fenced blocks and inline code: prose such as "make sure" is no command."""
    fenced = re.findall(r"^```.*?\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    return "\n".join(fenced + inline)


def opening_comment(text):
    """The unbroken run of comment lines at the top, without their '#'."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return lines


def test_documented_commands_exist():
    problems = [
        f"{relative(path)}: no {command}"
        for path in repository_files()
        if path.suffix == ".md"
        for command in unknown_commands(code_in_markdown(path.read_text()))
    ]
    assert not problems, "\n" + "\n".join(problems)


def test_readme_shows_the_two_commands():
    code = code_in_markdown((ROOT / "README.md").read_text())
    assert {"quickstart", "test"} <= {found["target"] for found in COMMAND.finditer(code)}


def test_unknown_commands_are_noticed():
    text = code_in_markdown(
        "make sure\n```sh\nmake quickstart\nmake dinner\npython -m pytest\n```\n"
        "`python -m experiments.nothing --gin_file=gin_configs/nothing.gin`"
    )
    assert unknown_commands(text) == [
        "make dinner",
        "python -m experiments.nothing",
        "gin_configs/nothing.gin",
    ]


def test_gin_files_open_with_their_command():
    paths = sorted((ROOT / "gin_configs").rglob("*.gin"))
    assert paths, "no gin files found"
    problems = []
    for path in paths:
        comment = opening_comment(path.read_text())
        commands = "\n".join(line for line in comment if COMMAND_LINE.match(line))
        if not COMMAND.search(commands):
            problems.append(f"{relative(path)}: opens with no command (make ... or python -m ...)")
        if len([line for line in comment if line]) < 2:
            problems.append(f"{relative(path)}: does not say what to expect from the command")
        problems += [f"{relative(path)}: no {name}" for name in unknown_commands(commands)]
    assert not problems, "\n" + "\n".join(problems)


def test_no_file_mentions_a_machine():
    problems = []
    for path in repository_files():
        for number, line in enumerate((text_of(path) or "").splitlines(), 1):
            if MACHINE_PATH.search(line):
                problems.append(f"{relative(path)}:{number}: {line.strip()[:100]}")
    assert not problems, "paths of one machine:\n" + "\n".join(problems)


def test_machine_paths_are_noticed():
    for home in ("work", "root", "home", "Users"):
        assert MACHINE_PATH.search(f"open('/{home}/someone/data.json')")
    for fine in ("runs/work/a", "https://example.org/home/page", "a /tmp/x b", "n/root/2"):
        assert not MACHINE_PATH.search(fine)


def test_files_are_short():
    lengths = {
        relative(path): len(path.read_text().splitlines())
        for package in PROGRAM_CODE
        for path in (ROOT / package).rglob("*.py")
    }
    too_long = {name: lines for name, lines in lengths.items() if lines > MAX_LINES}
    unexpected = set(too_long) - set(LONG_FILES)
    assert not unexpected, (
        f"over {MAX_LINES} lines: {[(name, too_long[name]) for name in sorted(unexpected)]}; "
        "split them, or give the reason in LONG_FILES of tests/test_repository.py"
    )
    stale = set(LONG_FILES) - set(too_long)
    assert not stale, f"LONG_FILES lists files that are short or gone: {sorted(stale)}"
    assert all(len(reason) > 20 for reason in LONG_FILES.values())


def test_every_package_is_importable():
    folders = {path.parent for package in PROGRAM_CODE for path in (ROOT / package).rglob("*.py")}
    missing = sorted(
        relative(folder) for folder in folders if not (folder / "__init__.py").is_file()
    )
    assert not missing, f"no __init__.py in {missing}"
    assert (ROOT / "bluelm_jax" / "py.typed").is_file()


def test_requirements_have_both_bounds():
    seen = 0
    for path in sorted(ROOT.glob("requirements*.txt")):
        for line in path.read_text().splitlines():
            if line and not line.startswith("#"):
                assert re.match(r"[\w.\[\]-]+>=[\w.]+,<[\w.]+(;.*)?$", line), (
                    f"{path.name}: {line!r}"
                )
                seen += 1
    assert seen > 20


def test_ci_script_is_executable():
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
