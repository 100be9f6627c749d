"""Live parity with transformers, over more sizes and seeds than the stored references.

python -m tests.parity                       # all cases, exit status 1 where one fails
python -m tests.parity --seeds 20 --only llama_prime qwen2
"""

from __future__ import annotations

import argparse
import collections
import sys

import jax
import rich.console
import rich.progress
import rich.table

from tests.parity import cases, compare, reference, torch_tools
from tests.parity.compare import Result

# Every block's output is one line of the table.
LAYERS = ("embedded", "layer.")


def line_of(result: Result) -> str:
    """The table's line that a result belongs to."""
    if result.check.startswith(LAYERS):
        return "embedding and every block"
    return {"last": "after the last norm"}.get(result.check, result.check)


def worst(results: list[Result]) -> Result:
    """The one nearest to its bound, or furthest beyond it; NaN is furthest."""

    def share(result: Result) -> float:
        share = result.error / result.bound if result.bound else float(result.error)
        return share if share == share else float("inf")

    return max(results, key=share)


def table_of(found: dict[str, list[Result]], seeds: int) -> rich.table.Table:
    """Cases by lines, each the worst of all seeds and layers."""
    title = f"Parity with transformers, {seeds} seeds, worst of each line"
    table = rich.table.Table(title=title)
    for heading in ("model", "dtype", "compared"):
        table.add_column(heading, no_wrap=True)
    for heading in ("outputs", "error", "bound", "pass"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, results in found.items():
        lines: dict[tuple[str, str], list[Result]] = collections.defaultdict(list)
        for result in results:
            lines[result.dtype, line_of(result)].append(result)
        for (dtype, line), members in lines.items():
            bad = worst(members)
            passed = all(result.passed for result in members)
            error, bound = f"{bad.error:.1e}", f"{bad.bound:.1e}"
            if not bad.bound and float(bad.error).is_integer():
                error, bound = f"{bad.error:.0f}", "0"
            table.add_row(
                name, dtype, line, str(len(members)), error, bound, "yes" if passed else "NO"
            )
        table.add_section()
    return table


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="seeds of each case")
    parser.add_argument("--only", nargs="*", choices=cases.LIVE, help="cases; default: all")
    args = parser.parse_args()
    if args.seeds < 1:
        parser.error(f"--seeds {args.seeds}: must be >= 1")
    found: dict[str, list[Result]] = {}
    console = rich.console.Console(width=130)
    names = args.only or list(cases.LIVE)
    for name in rich.progress.track(names, console=rich.console.Console(stderr=True)):
        found[name] = []
        for seed in range(args.seeds):
            outputs, facts = reference.run(cases.LIVE[name], seed)
            found[name] += compare.run(cases.LIVE[name], seed, outputs, facts)
        found[name] = compare.over_seeds(found[name])
    console.print(table_of(found, args.seeds))
    failed = [name for name, results in found.items() if not all(r.passed for r in results)]
    made = " ".join(f"{k} {v}" for k, v in torch_tools.versions().items())
    print(f"jax {jax.__version__} on {jax.default_backend()}, {made}, PyTorch on the CPU")
    print(f"FAILED: {', '.join(failed)}" if failed else f"all {len(found)} models passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
