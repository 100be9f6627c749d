"""What made a result: code version, machine, memory, time."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from experiments.results import Phase, RunInfo


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def version() -> dict[str, str]:
    """Package version and git commit of the code that runs; 'unknown' where there is no git."""
    root = Path(__file__).resolve().parents[1]
    git = subprocess.run(
        ["git", "-C", str(root), "describe", "--always", "--dirty"], capture_output=True, text=True
    ) if shutil.which("git") else None  # fmt: skip
    commit = git.stdout.strip() if git and git.returncode == 0 else "unknown"
    try:
        release = importlib.metadata.version("bluelm_jax")
    except importlib.metadata.PackageNotFoundError:
        release = "source tree"
    return {"version": release, "commit": commit}


def peak_rss_mb() -> float:
    """Largest resident memory of this process and of any child that ended, MB."""
    usage = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(who).ru_maxrss for who in usage) / 1024


def command(module: str) -> str:
    """The command that started this process, to paste into a shell."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def run_info(
    *,
    task: str,
    seeds: Sequence[int],
    seconds: Mapping[str, float],
    tile_size: int,
    data: dict[str, Any],
    steps: dict[str, Any],
    config: dict[str, Any],
    design: str,
    commands: Sequence[str],
    compared: str = "tiling scheme",
) -> RunInfo:
    """What a report says of how its numbers were made; `seconds` is by phase."""
    device = jax.devices()[0]
    made = version()
    return RunInfo(
        seeds=list(seeds),
        version=made["version"],
        commit=made["commit"],
        device=f"{device.platform}: {device.device_kind}, {num_cores()} cores",
        phases=[Phase(name=name, seconds=spent) for name, spent in seconds.items()],
        peak_rss_mb=peak_rss_mb(),
        tile_size=tile_size,
        data=data,
        steps=steps,
        config=config,
        design=design,
        task=task,
        compared=compared,
        commands=list(commands),
    )
