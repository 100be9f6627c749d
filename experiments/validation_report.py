"""What validation found, as a table, as JSON, and as lines of JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bluelm_jax import files
from bluelm_jax.data.findings import KINDS, SEVERITIES, Finding
from bluelm_jax.data.sample_checks import STOPS
from bluelm_jax.data.validation import Options, Report, SourceReport

_PERCENTILES = (0, 50, 90, 99, 100)


def kind_lines() -> Iterator[str]:
    """Every kind with severity and meaning, a line each."""
    for name, (severity, meaning) in KINDS.items():
        yield f"{severity:<8} {name:<24} {meaning}"


def lines(report: Report) -> Iterator[str]:
    """The report as a table for people."""
    for source in report.sources:
        yield from _source_lines(source)
        yield ""
    counts = ", ".join(f"{n} {plural(name, n)}" for name, n in _by_severity(report).items())
    yield counts + (" (partial: broken off)" if report.partial else "")


def plural(severity: str, count: int) -> str:
    """`severity` as a word that goes with `count`."""
    return severity if count == 1 or severity == "info" else severity + "s"


def _source_lines(source: SourceReport) -> Iterator[str]:
    yield f"{source.path}: {source.checked} of {source.records} records checked"
    for name, sizes in (("positions", source.lengths), ("tiles", source.views)):
        if sizes:
            shown = ", ".join(f"{p} % {v}" for p, v in percentiles(sizes).items())
            yield f"  {name} of the samples that fit: {shown}"
    if source.checked:
        yield f"  one pass under this config's policies: {_outcome(source.counters)}"
    for severity in SEVERITIES:
        for kind in (k for k in KINDS if KINDS[k].severity == severity and source.kinds[k]):
            yield f"  {severity:<7} {kind:<24} {source.kinds[kind]:>8}  {KINDS[kind].meaning}"
            kept = source.examples.get(kind, [])
            yield from (f"    {finding.line()}" for finding in kept)
            if kept and len(kept) < source.kinds[kind]:
                yield f"    and {source.kinds[kind] - len(kept)} more"


def _outcome(counters: Counter[str]) -> str:
    shown = dict(counters)
    parts = [f"{shown.pop('samples', 0)} samples used"]
    if stops := shown.pop(STOPS, 0):
        parts.append(f"{stops} at which the run would stop")
    return ", ".join([*parts, *(f"{reason} {n}" for reason, n in sorted(shown.items()))])


def percentiles(sizes: Counter[int]) -> dict[int, int]:
    """Percentile -> size, by nearest rank."""
    total = sum(sizes.values())
    ranks = [max(1, -(-percent * total // 100)) for percent in _PERCENTILES]
    found: list[int] = []
    below = 0
    for size in sorted(sizes):
        below += sizes[size]
        while len(found) < len(ranks) and ranks[len(found)] <= below:
            found.append(size)
    return dict(zip(_PERCENTILES, found, strict=True))


def _by_severity(report: Report) -> dict[str, int]:
    counts: dict[str, int] = dict.fromkeys(SEVERITIES, 0)
    for source in report.sources:
        for kind, n in source.kinds.items():
            counts[KINDS[kind].severity] += n
    return counts


def to_json(report: Report, options: Options) -> dict[str, Any]:
    """The report as plain data; the examples of a kind are its first ones."""
    return {
        "partial": report.partial,
        "options": dataclasses.asdict(options),
        "counts": _by_severity(report),
        "sources": [_source_json(source) for source in report.sources],
    }


def _source_json(source: SourceReport) -> dict[str, Any]:
    kinds = {
        kind: {
            "severity": KINDS[kind].severity,
            "count": source.kinds[kind],
            "meaning": KINDS[kind].meaning,
            "examples": [_finding_json(f) for f in source.examples.get(kind, [])],
        }
        for kind in KINDS
        if source.kinds[kind]
    }
    sizes = {
        name: {f"p{p}": v for p, v in percentiles(found).items()}
        for name, found in (("positions", source.lengths), ("tiles", source.views))
        if found
    }
    return {
        "path": source.path,
        "records": source.records,
        "checked": source.checked,
        "counters": dict(sorted(source.counters.items())),
        **sizes,
        "kinds": kinds,
    }


def _finding_json(finding: Finding) -> dict[str, Any]:
    return {"kind": finding.kind, "severity": finding.severity, **dataclasses.asdict(finding)}


def write(path: str, report: Report, options: Options) -> None:
    """Writes the summary; `finding_writer` has written the findings beside it."""
    summary = {**to_json(report, options), "findings": _findings_path(path).name}
    files.write_text(path, json.dumps(summary, indent=1) + "\n")


def _findings_path(path: str) -> Path:
    return Path(path).with_suffix(".findings.jsonl")


def check_target(path: str, sources: Sequence[str]) -> None:
    """Raises ValueError if a report cannot be written there, or would be written over other data.

    Args:
      path: of the report.
      sources: what the check reads: files, folders, whose inside is theirs, and patterns.
    """
    if Path(path).is_dir():
        raise ValueError(f"--report={path}: a folder; name a file in it, such as check.json")
    for target in (Path(path), _findings_path(path)):
        real = target.resolve()
        for source in sources:
            names = [source, *(glob.glob(source) if glob.has_magic(source) else [])]
            if any(real.is_relative_to(Path(name).resolve()) for name in names):
                raise ValueError(f"--report={path}: would write over the data in {source}")
        if target.is_dir():
            raise ValueError(f"--report={path}: {target} is a folder")
        if target.exists() and not _may_be_report(target):
            raise ValueError(f"--report={path}: {target} exists and is no report")


def _may_be_report(path: Path) -> bool:
    """Whether a file is empty or starts as reports do, so not an image or array of records."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(1) in (b"", b"{")


@contextlib.contextmanager
def finding_writer(path: str | None) -> Iterator[Callable[[Finding], None]]:
    """Writes every finding as a line of JSON beside the report; with None, nowhere."""
    if path is None:
        yield lambda finding: None
        return
    target = _findings_path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", encoding="utf-8") as file:
        yield lambda finding: print(json.dumps(_finding_json(finding)), file=file)
