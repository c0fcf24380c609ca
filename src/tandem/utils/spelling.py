"""Which known name somebody has meant."""

import difflib
from collections.abc import Iterable

ALIKE = 0.75  # `prot` for `port`; not `environment` for `deployment`, which have two thirds of their letters in common
SHORTEST = 3  # of two letters, one wrong says nothing


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that differs by a slip, or that alone begins so; None where the letters do not say so."""
    names = list(known)
    if close := difflib.get_close_matches(name, names, n=1, cutoff=ALIKE):
        return close[0]
    near = [other for other in names if other.startswith(name) or _has_one_wrong(name, other)]
    return near[0] if len(near) == 1 and len(name) >= SHORTEST else None


def _has_one_wrong(name: str, other: str) -> bool:
    """One letter in place of another, which is a third of a name of three."""
    return len(name) == len(other) and sum(ours != theirs for ours, theirs in zip(name, other, strict=True)) == 1
