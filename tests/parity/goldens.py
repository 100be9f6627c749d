"""Makes the stored references, or checks that making them again gives the same bytes.

python -m tests.parity.goldens            # write tests/testdata/parity/*.safetensors
python -m tests.parity.goldens --check    # compare; exit status 1 where bytes differ
"""

from __future__ import annotations

import argparse
import sys

from tests.parity import cases, reference, stored, torch_tools


def make(name: str) -> bytes:
    """The bytes of one file."""
    runs, facts = {}, {}
    for seed in cases.SEEDS:
        runs[seed], facts = reference.run(stored.case_of(name, seed), seed)
    facts["config"].pop("transformers_version", None)  # Stands among the versions.
    return stored.pack(name, runs, facts, torch_tools.versions())


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; compare bytes")
    check = parser.parse_args().check
    stored.FOLDER.mkdir(parents=True, exist_ok=True)
    different = []
    for name in cases.GOLDEN:
        path, data = stored.path_of(name), make(name)
        same = path.is_file() and path.read_bytes() == data
        if not check:
            path.write_bytes(data)
        elif not same:
            different.append(name)
        state = "unchanged" if same else "differs" if check else "written"
        print(f"{path.name}: {len(data):,} bytes, {state}")
    print("made with", ", ".join(f"{k} {v}" for k, v in torch_tools.versions().items()))
    if different:
        print(f"differ from what these versions make here: {different}", file=sys.stderr)
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
