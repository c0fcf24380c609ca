"""The event loop of an engine that is a server of its own: how other threads reach it, and how it ends.

    caller threads ──send: an action, without an answer──► loop
                   ──call: an operation──────────────────► loop ──answer──► the caller, who waited

It ends when it is told to (`stop`) or when the engine fails (`fail`). From then on it takes nothing in, and
later callers are told why.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from tandem.inference.engine import EngineError

logger = logging.getLogger(__name__)
T = TypeVar("T")
SHUTTING_DOWN = "the engine is shutting down"


class EngineLoop:
    """`run` is for the thread that the loop lives in; `send`, `call` and `stop` for all others."""

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self.failure: str | None = None
        self._on_failure = on_failure
        self._is_ending = False
        self._mutex = threading.Lock()  # between callers and the end of the loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()  # operations, and what they left to be done

    @property
    def is_over(self) -> bool:
        return self.failure is not None or self._is_ending

    @property
    def why_over(self) -> str:
        return self.failure or SHUTTING_DOWN

    def run(
        self, live: Callable[[], Coroutine[Any, Any, None]], leave: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        """`live` until it returns, then `leave`, while nothing new comes in."""
        try:
            asyncio.run(self._host(live, leave))
        except Exception as error:
            logger.exception("the engine failed")
            self.fail(f"the engine failed: {type(error).__name__}: {error}")
        with self._mutex:
            self._is_ending = True

    def stop(self) -> None:
        with self._mutex:
            self._is_ending = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop.set)

    def send(self, action: Callable[[], None], refuse: Callable[[EngineError], None]) -> None:
        with self._mutex:
            if not self.is_over and self._loop is not None:
                self._loop.call_soon_threadsafe(action)
                return
        refuse(EngineError(self.why_over))

    def call(self, operation: Coroutine[Any, Any, T]) -> T:
        """Run an operation in the loop and wait for it; raises if the engine ends before."""
        with self._mutex:
            if self.is_over or self._loop is None:
                operation.close()
                raise EngineError(self.why_over)
            future = asyncio.run_coroutine_threadsafe(self._tracked(operation), self._loop)
        try:
            return future.result()
        except CancelledError:
            raise EngineError(self.why_over) from None

    # From here on, everything runs in the loop.

    def fail(self, reason: str) -> None:
        """Nothing works from here on; the first reason is the one that counts."""
        with self._mutex:
            if self.failure is not None:
                return
            self.failure = reason
        logger.error("%s", reason)
        self._on_failure(reason)
        self._stop.set()

    async def until_stopped(self, task: "asyncio.Task[None]") -> bool:
        """Until the task is done or the engine is to end, whichever comes first. Whether it is to end."""
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
        for left in (task, stopped):
            left.cancel()
        await asyncio.gather(task, stopped, return_exceptions=True)
        return self._stop.is_set()

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def cancel_operations(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _host(
        self, live: Callable[[], Coroutine[Any, Any, None]], leave: Callable[[], Coroutine[Any, Any, None]]
    ) -> None:
        with self._mutex:
            self._loop = asyncio.get_running_loop()
        try:
            await live()
        finally:
            with self._mutex:
                self._is_ending = True
            await leave()
            with self._mutex:
                self._loop = None

    async def _tracked(self, operation: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await operation
        finally:
            operation.close()  # if it was never begun
            self._tasks.discard(task)
