"""An event loop that does not stand still, however many connections have something to read at once.

asyncio handles all of them in one pass, and timers and other tasks wait for its end. With ten thousand conversations a
pass may have thousands of answers; here it has a few of them, and the others their turn in the next.
"""

import asyncio
import selectors
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")
AT_ONCE = 12  # an answer takes up to a millisecond


class FewAtOnce(selectors.DefaultSelector):
    """Tells of what is ready a few at a time, in the order it was found."""

    def __init__(self) -> None:
        super().__init__()
        self._found: deque[tuple[selectors.SelectorKey, int]] = deque()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._found:
            self._found.extend(super().select(timeout))
        told = [self._found.popleft() for _ in range(min(AT_ONCE, len(self._found)))]
        # One that was closed or is waited for otherwise by now is found again, if there is still something.
        registered = self.get_map()
        return [(key, events) for key, events in told if registered.get(key.fd) is key]


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run."""
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(FewAtOnce())) as runner:
        return runner.run(main)


def run_blocking(main: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, also where a loop is running, as in a notebook: then in another thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(main)
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, main).result()
