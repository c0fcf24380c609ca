"""Blocking calls of users' code beside the event loop, each within its time."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

Calls = SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
"""What a thread has to do; None: nothing more."""


class GivenUp(TimeoutError):
    """A call took too long: how long it had."""


class DaemonThreads:
    """At most `size` calls at a time. Threads are used again: processes that a call has started may end with its
    thread. One whose call is given up is left to itself: it keeps neither other calls waiting nor the program from
    ending."""

    def __init__(self, size: int, name: str) -> None:
        self.name = name
        self._slots = asyncio.Semaphore(size)
        self._idle: list[Calls] = []

    async def run(self, timeout_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function returns or raises. Waiting for a thread does not count as its time."""
        async with self._slots:
            calls = self._idle.pop() if self._idle else self._start()
            future: Future[Any] = Future()
            future.set_running_or_notify_cancel()  # whoever gives up waiting does not cancel it
            calls.put((future, function, arguments))
            limit = asyncio.timeout(timeout_s)
            try:
                async with limit:
                    return await asyncio.wrap_future(future)
            except TimeoutError as error:
                if not limit.expired():
                    raise
                raise GivenUp(f"it took longer than {timeout_s:g} s") from error
            finally:
                if future.done():
                    self._idle.append(calls)
                else:
                    calls.put(None)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().put(None)

    def _start(self) -> Calls:
        calls: Calls = SimpleQueue()
        threading.Thread(target=_work, args=(calls,), name=self.name, daemon=True).start()
        return calls


def _work(calls: Calls) -> None:
    while (call := calls.get()) is not None:
        future, function, arguments = call
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        del call, future, function, arguments  # nothing is kept while there is nothing to do
