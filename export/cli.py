"""What the export commands share: gin flags and how a mistake ends."""

from __future__ import annotations

import sys
from collections.abc import Callable

from absl import app, flags, logging

from export import gin_setup

GIN_FILE = flags.DEFINE_multi_string("gin_file", [], "Gin config file; may be repeated.")
GIN_BINDINGS = flags.DEFINE_multi_string(
    "gin_bindings", [], "Gin binding 'Class.field = value', applied last; may be repeated."
)
DRY_RUN = flags.DEFINE_bool("dry_run", False, "Print what would be done, and stop.")


def build(cls: type[gin_setup.T]) -> gin_setup.T:
    """The config that --gin_file and --gin_bindings describe."""
    return gin_setup.build(cls, GIN_FILE.value, GIN_BINDINGS.value)


def run(main: Callable[[], None]) -> None:
    """Runs an absl main; a user's mistake ends in one message and exit status 2.

    `--v=1` shows the traceback as well.
    """

    def guarded(argv: list[str]) -> None:
        try:
            if len(argv) > 1:
                raise ValueError(f"unexpected arguments {argv[1:]}; options start with --")
            main()
        except (ValueError, OSError) as error:
            if logging.get_verbosity() > 0:
                raise
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)

    logging.set_verbosity(logging.WARNING)
    app.run(guarded)
