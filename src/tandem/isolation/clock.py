"""The one clock of time limits: it counts what a call's own code takes, not what others keep it from running.

One call that blocks the event loop, or holds the interpreter lock, stops all others. Time limits are timers of the
loop, and the loop's clock stops while the loop is blocked, so the others are not charged for that time. The call itself
is: calls.py charges it for the time its code ran, and the owner of the process kills one whose loop stands still.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tandem.isolation.failures import Failure, TimedOut

T = TypeVar("T")
TURN_S = 0.1
MAX_COUNTED_S = 0.25  # between two turns


@dataclass(frozen=True)
class Limit:
    seconds: float
    reason: str  # what is said of code that takes longer


async def within(limit: Limit, awaitable: Awaitable[T]) -> T:
    """What it gives or raises; TimedOut where it takes longer, and it is cancelled."""
    timeout = asyncio.timeout(limit.seconds)
    try:
        async with timeout:
            return await awaitable
    except TimeoutError:
        if not timeout.expired():
            raise
        raise TimedOut(Failure(limit.reason, fault="time")) from None


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


class Clock:
    """Times the code of one call. It stands still while the call waits for the other side, and starts anew after that.
    `over` is done, with the reason, when that code, or the `whole` call with all it waits for, has taken too long."""

    def __init__(self, limit: Limit, whole: Limit | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self.over: asyncio.Future[str] = self._loop.create_future()
        self._limit = limit
        self._whole = whole
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._whole_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._whole is not None:
            self._whole_timer = self._loop.call_later(self._whole.seconds, self._end, self._whole.reason)
        self._start_timer(self._loop.time() + self._limit.seconds)

    def pause(self) -> None:
        self._waiting += 1
        self._stop_timer()

    def go_on(self) -> None:
        self._waiting -= 1
        if self._waiting == 0:
            self._start_timer(self._loop.time() + self._limit.seconds)

    def charge(self, seconds: float) -> None:
        """Time that the code took, and the event loop's clock does not count."""
        if self._timer is not None:
            end = self._timer.when() - seconds
            self._stop_timer()
            self._start_timer(end)
            if end <= self._loop.time():  # now: code that blocks the loop again at once keeps timers from their turn
                self._end(self._limit.reason)

    def stop(self) -> None:
        self.pause()
        if self._whole_timer is not None:
            self._whole_timer.cancel()

    def _start_timer(self, end: float) -> None:
        self._timer = self._loop.call_at(end, self._end, self._limit.reason)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, reason: str) -> None:
        if not self.over.done():
            self.over.set_result(reason)
