"""How far `sweep` is with work that takes a while."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

EVERY_S = 2.0
T = TypeVar("T")


def reported(items: Sequence[T], done: str, clock: Callable[[], float] = time.monotonic) -> Iterator[T]:
    """The items; every two seconds a line says how many of the runs are `done`."""
    told_at = clock()
    for number, item in enumerate(items):
        if clock() - told_at >= EVERY_S:
            print(f"sweep: {number:,} of {len(items):,} runs {done}", file=sys.stderr, flush=True)
            told_at = clock()
        yield item
