"""What every worker process of this package does first."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading


def follow_parent() -> None:
    """A worker neither takes Ctrl-C for itself nor outlives the main process."""
    # A terminal sends Ctrl-C to workers too, where it would break off what the main one waits for.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed main process cannot stop its workers, which would wait for it for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
