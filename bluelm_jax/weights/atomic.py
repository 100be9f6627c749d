"""Folders that are whole or not there."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from bluelm_jax.weights.plan import WeightsError

SUFFIX = ".unfinished"


@contextlib.contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out` that becomes `out` at the end, and is removed if something goes wrong.

    Raises:
      WeightsError: there is something at `out` already.
    """
    out = out.absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise WeightsError(f"{out} exists: choose another folder or remove it")
    partial = out.with_name(out.name + SUFFIX)
    shutil.rmtree(partial, ignore_errors=True)  # Of a process that was killed.
    partial.mkdir(parents=True)
    try:
        yield partial
        if out.is_dir():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
