"""Scalars of a run, as JSON lines and as TensorBoard events."""

from __future__ import annotations

import json
from pathlib import Path

from tensorboardX import SummaryWriter

from bluelm_jax.files import write_text


class MetricsLog:
    """Writes scalars by step; a resumed run continues its files without repeating a step."""

    def __init__(self, directory: str | Path, step: int):
        self._path = Path(directory) / "metrics.jsonl"
        kept = [line for line in read_lines(self._path) if line["step"] <= step]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._file = self._path.open("a")
        self._events = SummaryWriter(str(directory), purge_step=step + 1, write_to_disk=True)

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Appends one line, {"step": step, **metrics}."""
        self._file.write(json.dumps({"step": step, **metrics}) + "\n")
        self._file.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self._events.close()


def read_lines(path: Path) -> list[dict[str, float]]:
    """The lines of a metrics.jsonl; [] when there is none. A torn last line is left out."""
    if not path.is_file():
        return []
    lines = []
    for text in path.read_text().splitlines():
        try:
            lines.append(json.loads(text))
        except json.JSONDecodeError:
            break
    return lines
