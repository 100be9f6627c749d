"""What to read for each weight, from the names and shapes in a checkpoint's headers alone.

Everything that can be wrong with a checkpoint as a whole is found here, before a byte of a tensor is
read: unknown, missing and mis-shaped tensors are listed together.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from bluelm_jax.params import Param
from bluelm_jax.weights.names import LAYER, Entry, Naming, Part

Shape = tuple[int, ...]
_SHOWN = 12


class WeightsError(ValueError):
    """A checkpoint that is damaged, incomplete, of another model or of an unsupported kind."""


@dataclasses.dataclass(frozen=True)
class Read:
    """How one weight is put together.

    Attributes:
      entry: row of the table.
      names: its tensors as the checkpoint spells them; one for each block of a stacked weight.
      param: its declaration.
    """

    entry: Entry
    names: tuple[str, ...]
    param: Param

    @property
    def shape(self) -> Shape:
        """Our shape of what one tensor becomes."""
        return self.param.shape[1:] if self.entry.stacked else self.param.shape


@dataclasses.dataclass(frozen=True)
class Plan:
    """All reads of a part.

    Attributes:
      part: the part.
      reads: one for each weight.
      unused: tensors of the checkpoint that are known and left out.
      twins: pairs of tensors that are both there and must be equal.
    """

    part: Part
    reads: tuple[Read, ...]
    unused: tuple[str, ...]
    twins: tuple[tuple[str, str], ...]


def source_shapes(entry: Entry, shape: Shape) -> tuple[Shape, ...]:
    """The shapes of a tensor that becomes ours of `shape`."""
    match entry.transform:
        case "linear":
            return (shape[::-1],)
        case "patch":
            height, width, colours, out = shape
            return (out, colours, height, width), (out, height * width * colours)
        case "none":
            return (shape,)


def expand(entry: Entry, param: Param, naming: Naming) -> tuple[str, ...]:
    """Names of an entry's tensors, block by block."""
    name = naming.spell(entry.name)
    if not entry.stacked:
        return (name,)
    return tuple(name.replace(LAYER, str(i)) for i in range(param.shape[0]))


def make_plan(part: Part, headers: Mapping[str, Shape], where: str = "the tensors") -> Plan:
    """Plans the reads of a part.

    Args:
      headers: shape of every tensor of the checkpoint.
      where: what to call the checkpoint in messages.

    Raises:
      WeightsError: no tensor of the part is there, or any tensor is missing, unknown or of another
        shape; the message counts them all and lists the first dozen.
    """
    naming = find_naming(part, headers, where)
    declared = part.declared()
    reads = tuple(
        Read(entry, expand(entry, declared[entry.path], naming), declared[entry.path])
        for entry in part.entries
    )
    wanted = {name: read for read in reads for name in read.names}
    problems = [f"{name}: missing" for name in wanted if name not in headers]
    problems += [
        f"{name}: shape {list(headers[name])}, expected {_shapes_text(read)}"
        for name, read in wanted.items()
        if name in headers and tuple(headers[name]) not in source_shapes(read.entry, read.shape)
    ]
    twins = tuple(
        (copy, original)
        for copy, original in ((naming.spell(a), naming.spell(b)) for a, b in part.twins)
        if copy in headers
    )
    rest = [name for name in headers if name not in wanted and name not in dict(twins)]
    unused = tuple(name for name in rest if _is_unused(part, naming, name))
    problems += [f"{name}: unknown" for name in sorted(set(rest) - set(unused))]
    if problems:
        raise WeightsError(
            f"{where}: not this {part.name}, {_counted(problems)}: {listed(problems)}"
        )
    return Plan(part, reads, unused, twins)


def find_naming(part: Part, headers: Mapping[str, Shape], where: str) -> Naming:
    """The spelling under which the part's first tensor is found."""
    anchor = part.entries[0].name
    found = [naming for naming in part.namings if naming.spell(anchor) in headers]
    if len(found) == 1:
        return found[0]
    spelt = ", ".join(naming.spell(anchor) for naming in part.namings)
    if not found:
        some = ", ".join(sorted(headers)[:4]) or "nothing"
        raise WeightsError(f"{where}: no {part.name}: it has none of {spelt}; it holds {some} ...")
    both = ", ".join(naming.spell(anchor) for naming in found)
    raise WeightsError(f"{where}: two models in one: {both}")


def _is_unused(part: Part, naming: Naming, name: str) -> bool:
    if any(re.fullmatch(pattern, name) for pattern in naming.others):
        return True
    for start, instead in naming.prefixes:
        if name.startswith(instead):
            ours = start + name.removeprefix(instead)
            if any(re.fullmatch(pattern, ours) for pattern in part.unused):
                return True
    return False


def _shapes_text(read: Read) -> str:
    return " or ".join(str(list(s)) for s in source_shapes(read.entry, read.shape))


def _counted(problems: list[str]) -> str:
    kinds = {"missing": 0, "unknown": 0, "mis-shaped": 0}
    for line in problems:
        kinds[
            line.rsplit(": ", 1)[-1] if line.endswith(("missing", "unknown")) else "mis-shaped"
        ] += 1
    return ", ".join(f"{count} {kind}" for kind, count in kinds.items() if count)


def listed(problems: list[str]) -> str:
    """The first few of many lines."""
    more = len(problems) - _SHOWN
    return "; ".join(problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
