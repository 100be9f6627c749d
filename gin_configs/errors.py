"""How a user's mistake ends: one line and exit status 2, not a traceback."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator

from absl import logging

USER_ERRORS = (
    ValueError,
    FloatingPointError,
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
)
CONTINUES = "the same command continues where this stopped"
BROKEN_PIPE = 141  # What a shell reports of a process that SIGPIPE ended.


def fail(message: str) -> None:
    """Prints `error: message` and exits with status 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


@contextlib.contextmanager
def starts_anew() -> Iterator[None]:
    """Ctrl-C in here says that nothing was kept, for commands that keep nothing."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("nothing was kept; the same command starts anew") from None


def _nobody_reads() -> None:
    """Ends quietly. Python flushes stdout once more at its end, and would complain there."""
    with contextlib.suppress(OSError, ValueError):  # ValueError: no file behind it, or closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(BROKEN_PIPE)


def guarded(main: Callable[[list[str]], None]) -> Callable[[list[str]], None]:
    """`main(argv)` with mistakes ended so; `--v=1` shows the traceback instead."""

    @functools.wraps(main)
    def wrapper(argv: list[str]) -> None:
        try:
            main(argv)
            sys.stdout.flush()  # Here, where a closed pipe is expected.
        except BrokenPipeError:  # as by `| head`
            _nobody_reads()
        except USER_ERRORS as e:
            if logging.get_verbosity() > 0:
                raise
            fail(str(e))
        except OSError as e:  # no space left, too many files, ...
            fail(f"{e.strerror}: {e.filename}" if e.filename else str(e))
        except KeyboardInterrupt as e:
            print(f"interrupted; {e.args[0] if e.args else CONTINUES}", file=sys.stderr)
            sys.exit(130)

    return wrapper
