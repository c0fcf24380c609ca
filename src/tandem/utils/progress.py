"""How far a command is with work that takes a while."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tandem.utils.log import say

EVERY_S = 2.0
T = TypeVar("T")


def count_runs(number: int) -> str:
    return "1 run" if number == 1 else f"{number:,} runs"


def reported(items: Sequence[T], command: str, done: str, clock: Callable[[], float] = time.monotonic) -> Iterator[T]:
    """The items; every two seconds a line says how many of them are `done`: "runs written"."""
    told_at = clock()
    for number, item in enumerate(items):
        if clock() - told_at >= EVERY_S:
            say(f"{command}: {number:,} of {len(items):,} {done}", error=True)
            told_at = clock()
        yield item
