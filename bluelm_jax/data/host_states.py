"""Places of the order that hosts share, and states of N hosts for a run on M.

Host p of n reads places p, p + n, p + 2n, ... of one order. Hosts use up different numbers of
samples for a batch, so at a checkpoint some are further than others, and some samples have been read
but wait for room. Which places have been read is still a matter of n numbers: place g has, if host
g % n has read more than g // n of its own. A state carries those numbers for every number of hosts
that the run has had, as long as they matter, and places that they cover are passed over. So on
another number of hosts every sample comes exactly as often as before: none is lost, none comes twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

State = dict[str, Any]


class Host(NamedTuple):
    """Host `rank` among `total`."""

    rank: int
    total: int

    def place(self, own: int) -> int:
        """Place in the shared order of the host's own place `own`."""
        return self.rank + self.total * own

    def __str__(self) -> str:
        return f"{self.rank} of {self.total}"


ALONE = Host(0, 1)


def is_taken(place: int, taken: Sequence[State]) -> bool:
    """Whether hosts of an earlier part of the run have read `place`.

    `taken` holds {"hosts": n, "places": [own places read by host 0, 1, ..]} for each such part.
    """
    return any(place // t["hosts"] < t["places"][place % t["hosts"]] for t in taken)


def still_needed(taken: Sequence[State], place: int) -> list[State]:
    """The entries of `taken` that cover `place` or any after it."""
    return [t for t in taken if _end(t) > place]


def _end(taken: State) -> int:
    """The first place after all that an entry covers."""
    count, places = taken["hosts"], taken["places"]
    return max(Host(p, count).place(own - 1) + 1 if own else 0 for p, own in enumerate(places))


def merge_states(states: Sequence[State], hosts: int) -> list[State]:
    """States for `hosts` hosts from those of all hosts that saved a checkpoint.

    The new hosts start at the first place that nobody has read, pass over what somebody has, and
    share out the samples that waited. Host 0 continues the counters of all.

    Args:
      states: what `BatchIterator.get_state` gave on each host, at the same step.
      hosts: number of hosts from now on; with as many as before, the states are returned as they
        are.

    Raises:
      ValueError: states are missing, come twice, or belong to different orders.
    """
    states = sorted(states, key=lambda s: s["host"][0])
    count = len(states)
    given = [tuple(s["host"]) for s in states]
    if given != [(p, count) for p in range(count)]:
        shown = ", ".join(str(Host(*g)) for g in given)
        raise ValueError(f"the data states of hosts {shown}: must be one of each host")
    orders = sorted({s["order"] for s in states})
    if len(orders) > 1:
        raise ValueError(f"the data states belong to different orders: {', '.join(orders)}")
    if count == hosts:
        return list(states)
    now = {"hosts": count, "places": [int(s["place"]) for s in states]}
    history = [t for s in states for t in s["taken"]]
    history = [t for i, t in enumerate(history) if t not in history[:i]]
    taken = [*history, now]
    start = min(Host(p, count).place(own) for p, own in enumerate(now["places"]))
    while is_taken(start, taken):
        start += 1
    waiting = sorted(int(place) for s in states for place in s["waiting"])
    counters = [_sum_counters([s["counters"] for s in states])]
    counters += [{"counts": {}, "names": {}}] * (hosts - 1)
    return [
        {
            "order": orders[0],
            "host": [p, hosts],
            "place": max(0, -(-(start - p) // hosts)),
            "waiting": waiting[p::hosts],
            "taken": still_needed(taken, start),
            "counters": counters[p],
        }
        for p in range(hosts)
    ]


def _sum_counters(counters: Sequence[State]) -> State:
    counts: dict[str, int] = {}
    names: dict[str, list[str]] = {}
    for each in counters:
        for reason, count in each["counts"].items():
            counts[reason] = counts.get(reason, 0) + count
        for reason, kept in each["names"].items():
            names.setdefault(reason, []).extend(kept)
    return {"counts": counts, "names": names}
