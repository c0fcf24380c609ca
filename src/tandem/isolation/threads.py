"""Sync functions of users, in threads: each within its limit, and left behind where it does not end by then.

A thread cannot be ended. One whose call is over its time keeps neither other calls waiting nor the program from ending.
"""

import asyncio
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from tandem.isolation.clock import Limit, within
from tandem.isolation.failures import TimedOut, hung_at
from tandem.utils.errors import UserError

TRIAL_TIMEOUT_S = 60.0
T = TypeVar("T")


class Thread:
    """Runs one call after another, until `end`. The program does not wait for it."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., T], *arguments: Any) -> Future[T]:
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()  # who gives up waiting does not cancel it
        self._calls.put((future, function, arguments))
        return future

    def end(self) -> None:
        """After what it has been given."""
        self._calls.put(None)

    def timed_out(self, limit: Limit) -> TimedOut:
        """With the place where the call is now."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return TimedOut(hung_at(limit.reason, traceback.extract_stack(frame)))

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            try:
                future.set_result(function(*arguments))
            except BaseException as error:  # answers: whoever waits gets it
                future.set_exception(error)
            del call, future, function, arguments  # nothing is kept while there is nothing to do


class Threads:
    """At most `size` calls at a time. Threads are used again: processes that a call starts may end with its thread."""

    def __init__(self, size: int, name: str) -> None:
        self.name = name
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Thread] = []

    async def run(self, limit: Limit, function: Callable[..., T], *arguments: Any) -> T:
        """What the function returns or raises; TimedOut. Waiting for a thread does not count as its time."""
        async with self._slots:
            thread = self._idle.pop() if self._idle else Thread(self.name)
            future = thread.call(function, *arguments)
            try:
                return await within(limit, asyncio.wrap_future(future))
            except TimedOut:
                if future.done():  # the function's own
                    raise
                raise thread.timed_out(limit) from None
            finally:
                if future.done():
                    self._idle.append(thread)
                else:
                    thread.end()

    def close(self) -> None:
        """Calls that still run end when they do, or with the program."""
        while self._idle:
            self._idle.pop().end()


def try_within(timeout_s: float, what: str, function: Callable[..., T], *arguments: Any) -> T:
    """One call before anything starts: what it returns or raises; UserError, which begins with `what`, where it takes
    longer."""
    thread = Thread(what)
    future = thread.call(function, *arguments)
    thread.end()
    try:
        error = future.exception(timeout_s)
    except TimeoutError:
        pass
    else:
        if error is None:
            return future.result()
        raise error  # by `result` it would begin with frames of concurrent.futures
    failure = thread.timed_out(Limit(timeout_s, f"it took longer than {timeout_s:g} s on a tiny example")).failure
    raise UserError(f"{what} cannot be used: {failure}; it has to end\n{failure.frames}".rstrip())
