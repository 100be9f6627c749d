"""Ctrl-C noticed between steps, so that what is saved belongs together."""

from __future__ import annotations

import signal
import threading


class DeferredInterrupt:
    """A context in which the first Ctrl-C only sets `seen`; the second interrupts at once.

    A step that is broken off leaves weights that were donated to it, and a batch that was read but
    not trained on. Python gives signals to its main thread alone, so in any other thread this does
    nothing; nor does it where the caller has a handler of its own.
    """

    def __init__(self):
        self.seen = False
        self._installed = False

    def __enter__(self) -> DeferredInterrupt:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._installed = True
        return self

    def _note(self, *_: object) -> None:
        self.seen = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *exc: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)
