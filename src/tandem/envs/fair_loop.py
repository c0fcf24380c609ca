"""An event loop whose clock stops while the loop is blocked.

One call that blocks the loop, or holds the interpreter lock, stops all others. Time limits are timers of the loop, so
the others are not charged for that time. The call itself is: envs/calls.py charges it for the time its code ran, and
envs/worker_process.py kills a process whose loop has stopped for good.
"""

import asyncio
import time
from collections.abc import Callable

TURN_S = 0.1
MAX_COUNTED_S = 0.25  # between two turns


class FairLoop(asyncio.SelectorEventLoop):
    """`on_turn` is called ten times a second, while the loop is not blocked."""

    def __init__(self, on_turn: Callable[[], None]) -> None:
        self._on_turn = on_turn
        self._turned = time.monotonic()
        self._not_counted_s = 0.0
        super().__init__()
        self.call_soon(self._turn)

    def time(self) -> float:
        return min(time.monotonic(), self._turned + MAX_COUNTED_S) - self._not_counted_s

    def _turn(self) -> None:
        now = time.monotonic()
        self._not_counted_s += max(0.0, now - self._turned - MAX_COUNTED_S)
        self._turned = now
        self._on_turn()
        self.call_later(TURN_S, self._turn)
