"""Counts of what the data pipeline did, with the names of some of the samples concerned."""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass
class Counters:
    """Events by reason; part of the pipeline's state, so they survive a resume.

    Attributes:
      counts: events of each reason.
      names: the first `max_names` different samples of each reason, with what was wrong; one that
        comes again in a later epoch is counted again and named once.
      max_names: bound on the names kept for each reason.
    """

    max_names: int = 20
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    names: dict[str, list[str]] = dataclasses.field(default_factory=dict)

    def add(self, reason: str, name: str | None = None, count: int = 1) -> None:
        """Counts an event, and keeps the sample's name if it is new and there is room."""
        self.counts[reason] = self.counts.get(reason, 0) + count
        if name is None:
            return
        kept = self.names.setdefault(reason, [])
        if len(kept) < self.max_names and name not in kept:
            kept.append(name)

    def state(self) -> dict[str, Any]:
        """A JSON-able copy."""
        names = {reason: list(kept) for reason, kept in self.names.items()}
        return {"counts": dict(self.counts), "names": names}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned."""
        self.counts = dict(state["counts"])
        # States of several hosts put together, and old ones, may name a sample more than once.
        self.names = {reason: list(dict.fromkeys(kept)) for reason, kept in state["names"].items()}

    def summary(self) -> str:
        """One line for a log: every reason and its count."""
        return ", ".join(f"{reason} {n}" for reason, n in sorted(self.counts.items()))

    def report(self) -> str:
        """`summary`, then a line for each sample that a policy touched and whose name is kept."""
        lines = [
            f"  {reason}: {name}" for reason in sorted(self.names) for name in self.names[reason]
        ]
        return "\n".join([self.summary(), *lines])
