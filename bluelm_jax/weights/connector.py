"""What stands between tower and decoder has no public layout: our own names, dots for slashes."""

from __future__ import annotations

from bluelm_jax import config, vlm
from bluelm_jax.weights.names import Entry, Naming, Part, declared

OUTSIDE = ("vision", "decoder")


def part(cfg: config.VLMConfig) -> Part:
    """Downsampler, projector and newline as one part; tensors as in 'projector.fc1.kernel'.

    Kernels stay [in, out], as they are here.
    """
    specs = {name: tree for name, tree in vlm.specs(cfg).items() if name not in OUTSIDE}
    entries = tuple(Entry(path, path.replace("/", ".")) for path in declared(specs))
    return Part("connector", specs, entries, (Naming((("", ""),)),), ())
