"""How a user's mistake ends: one line and exit status 2, not a traceback."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from absl import logging

USER_ERRORS = (
    ValueError,
    FloatingPointError,
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)


def fail(message: str) -> None:
    """Prints `error: message` and exits with status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def guarded(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """`main(argv)` with mistakes ended so; `--v=1` shows the traceback instead."""

    @functools.wraps(main)
    def wrapper(argv: list[str]) -> None:
        try:
            main(argv)
        except USER_ERRORS as e:
            if logging.get_verbosity() > 0:
                raise
            fail(str(e))
        except OSError as e:  # no space left, too many files, ...
            fail(f"{e.strerror}: {e.filename}" if e.filename else str(e))
        except KeyboardInterrupt:
            print("interrupted; the same command continues where this stopped", file=sys.stderr)
            sys.exit(130)

    return wrapper
