"""Calls of code that users bring: each ends within its time limit, in a value or in a Failure, whatever it does.

    async function   a task of the event loop, cancelled at the limit
    sync function    a thread, left behind at the limit

What does not end by that lingers, and the outcome says so. Code that blocks the event loop, or holds the interpreter
lock, cannot be ended from here: the owner of the process watches for it and kills it. Marks say whose code runs, in the
event loop and in threads.
"""

import asyncio
import inspect
import time
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from tandem.isolation.clock import MAX_COUNTED_S, Clock, Limit
from tandem.isolation.failures import Failure, TimedOut, failure_of, hung_at
from tandem.isolation.marks import Marks
from tandem.isolation.threads import Threads

# Sync functions at the same time. More would share one interpreter lock, and time out for want of it.
MAX_THREADS = 8
# How long a cancelled task may take to end.
CANCEL_S = 1.0
CALLED_OFF = "it was called off"
# The call that started a task, and the tasks that it started.
CALL: ContextVar[int] = ContextVar("call", default=0)


class CancelledWaiting(asyncio.CancelledError):
    """A call was cancelled; the text says what it waited for."""


@dataclass(frozen=True)
class Outcome:
    value: Any = None
    failure: Failure | None = None
    lingers: bool = False  # the code did not end with its time: a thread, or a task that is not to be cancelled
    pending: str = ""  # what a cancelled call waited for


class Calls:
    """For the event loop that runs when it is made: tasks and threads that it starts from then on are marked."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self._threads = Threads(MAX_THREADS, "user's code")
        self._clocks: dict[int, Clock] = {}
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._make_task)
        loop.set_default_executor(_MarkedThreads(marks))

    async def run(self, number: int, limit: Limit, function: Callable[..., Any], *arguments: Any) -> Outcome:
        """Call `function`, sync or async."""
        if inspect.iscoroutinefunction(function):
            return await self.play(number, Clock(limit), function(*arguments))
        try:
            outcome = await self._threads.run(limit, self._settled_in_thread, number, function, arguments)
        except TimedOut as error:
            return Outcome(failure=error.failure, lingers=True)
        if inspect.isawaitable(outcome.value):  # a plain function that returns a coroutine
            return await self.play(number, Clock(limit), outcome.value)
        return outcome

    async def play(self, number: int, clock: Clock, episode: Awaitable[Any]) -> Outcome:
        """Run an episode for as long as its clock lets it. Who cancels this cancels the episode."""
        steps = _awaited(episode)
        task = asyncio.ensure_future(_settled(self._marked(steps, number), number))
        self._clocks[number] = clock
        clock.start()
        try:
            done, _ = await asyncio.wait([task, clock.over], return_when=asyncio.FIRST_COMPLETED)
            if task in done:
                return task.result()
            return await _cancelled(task, hung_at(clock.over.result(), _suspended_at(steps)))
        except asyncio.CancelledError:
            return await _cancelled(task, Failure(CALLED_OFF))
        finally:
            clock.stop()
            del self._clocks[number]

    def _settled_in_thread(self, number: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Outcome:
        with self.marks.in_thread(number):
            try:
                return Outcome(function(*arguments))
            except BaseException as error:  # answers: SystemExit, too, costs this call alone
                return Outcome(failure=failure_of(error))

    def _make_task(self, loop: asyncio.AbstractEventLoop, steps: Any, **options: Any) -> asyncio.Task[Any]:
        """A task factory: tasks that the code of a call starts are marked as that call."""
        if (number := CALL.get()) and inspect.iscoroutine(steps):
            steps = _awaited(self._marked(steps, number))
        return asyncio.Task(steps, loop=loop, **options)

    def _marked(self, steps: Coroutine[Any, Any, Any], number: int) -> "_Marked":
        return _Marked(steps, lambda: self.marks.in_loop(number), lambda seconds: self._end_step(number, seconds))

    def _end_step(self, number: int, seconds: float) -> None:
        self.marks.in_loop(0)
        if seconds > MAX_COUNTED_S and (clock := self._clocks.get(number)):
            clock.charge(seconds - MAX_COUNTED_S)


async def _cancelled(task: asyncio.Task[Outcome], failure: Failure) -> Outcome:
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=CANCEL_S)
    if done and not task.cancelled() and (pending := task.result().pending):
        failure = replace(failure, reason=f"{failure.reason}; {pending}")
    return Outcome(failure=failure, lingers=not done)


def _suspended_at(steps: Coroutine[Any, Any, Any]) -> traceback.StackSummary:
    """Where a coroutine waits, outermost frame first."""
    frames = []
    waits: Any = steps
    while (frame := getattr(waits, "cr_frame", None)) is not None:
        frames.append((frame, frame.f_lineno))
        waits = waits.cr_await
    return traceback.StackSummary.extract(frames)


async def _settled(awaitable: Awaitable[Any], number: int) -> Outcome:
    CALL.set(number)
    try:
        return Outcome(await awaitable)
    except CancelledWaiting as error:
        return Outcome(failure=failure_of(error), pending=str(error))
    except BaseException as error:  # SystemExit would end the event loop, CancelledError a call that was not cancelled
        return Outcome(failure=failure_of(error))


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class _MarkedThreads(ThreadPoolExecutor):
    """The threads of `asyncio.to_thread`: what they run belongs to the call that asks for it."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return super().submit(self._run, CALL.get(), fn, args, kwargs)

    def _run(self, number: int, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._marks.in_thread(number):
            return function(*args, **kwargs)


class _Marked:
    """A coroutine that says when a step of it begins and, with the seconds it took, ends."""

    def __init__(
        self, steps: Coroutine[Any, Any, Any], on_start: Callable[[], None], on_end: Callable[[float], None]
    ) -> None:
        self.steps = steps
        self.on_start = on_start
        self.on_end = on_end

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[Any], Any] = self.steps.send
        value: Any = None
        while True:
            self.on_start()
            started = time.monotonic()
            try:
                waited_for = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self.on_end(time.monotonic() - started)
            try:
                value = yield waited_for
                resume = self.steps.send
            except BaseException as error:  # answers: it is raised where the coroutine waits
                resume, value = self.steps.throw, error
