"""What every command shares: the gin flags, how its config is built, and how a mistake ends."""

from __future__ import annotations

from collections.abc import Callable

from absl import app, flags, logging

from gin_configs import binding
from gin_configs.errors import USER_ERRORS as USER_ERRORS
from gin_configs.errors import fail, guarded

GIN_FILE = flags.DEFINE_multi_string("gin_file", [], "Gin config file; may be repeated.")
GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings",
    [],
    "Gin binding 'Name.field = value', applied after the files; may be repeated.",
)
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "Print the resolved config and what would be done, and stop."
)


def run(main: Callable[[], None]) -> None:
    """Runs an absl main; a user's mistake ends in one message and exit status 2 (`errors`)."""

    def without_arguments(argv: list[str]) -> None:
        if len(argv) > 1:
            fail(f"unexpected arguments {argv[1:]}; options start with --")
        main()

    logging.set_verbosity(logging.WARNING)
    app.run(guarded(without_arguments), flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as e:
        fail(f"{e} (--help lists the flags)")
        raise  # Not reached: `fail` exits.


def build(root: type[binding.T], default_file: str | None = None) -> binding.T:
    """The `root` that --gin_file (or else `default_file`) and --gin_bindings describe."""
    files = GIN_FILE.value or ([default_file] if default_file else [])
    return binding.build(root, files, GIN_BINDINGS.value)
