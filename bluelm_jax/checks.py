"""Bounds of config fields: one form of error for all config classes."""

from __future__ import annotations


def check(owner: object, field: str, ok: bool, bound: str) -> None:
    """Raises ValueError naming class, field, value and bound unless `ok`."""
    if not ok:
        value = getattr(owner, field)
        raise ValueError(f"{type(owner).__name__}.{field} = {value!r}: must be {bound}")


def check_positive(owner: object, *fields: str) -> None:
    """Raises ValueError for the first of `fields` whose value is not above zero."""
    for field in fields:
        check(owner, field, getattr(owner, field) > 0, "> 0")
