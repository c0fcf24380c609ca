"""An event loop that does not stand still, however many connections have something to read at once.

asyncio handles all of them in one pass, and timers and other tasks wait for its end. With ten thousand conversations a
pass may have thousands of answers; here it has a few of them, and the others their turn in the next.
"""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
AT_ONCE = 32  # an answer takes up to a millisecond


class FewAtOnce(selectors.DefaultSelector):
    """Tells of some of what is ready; what is left is still ready the next time."""

    _passed = 0  # so that those at the end of the list have their turn too

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(timeout)
        if len(ready) <= AT_ONCE:
            return ready
        start = self._passed % len(ready)
        self._passed += AT_ONCE
        return (ready + ready)[start : start + AT_ONCE]


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FewAtOnce())) as runner:
        return runner.run(main)
