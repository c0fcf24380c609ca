"""Calls of code that users bring: each ends within its time limit, in a value or in a Failure, whatever it does.

    async function   a task of the event loop, cancelled at the limit
    sync function    a thread of its own, left behind at the limit

What does not end by that lingers, and the outcome says so. Code that blocks the event loop cannot be helped from
here: whoever owns the process watches for it and kills it (envs/process.py).
"""

import asyncio
import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from tandem.envs.failures import Failure, failure_of, hung_at
from tandem.envs.model import Clock
from tandem.rewards.weighted import RewardsPending

# Sync functions at the same time. More would share one interpreter lock, and time out for want of it.
MAX_THREADS = 8
# How long a cancelled task may take to end.
CANCEL_S = 1.0
CALLED_OFF = "the episode was called off"
# The call that started a task, and the tasks that it started.
CALL: ContextVar[int] = ContextVar("call", default=0)


@dataclass(frozen=True)
class Outcome:
    value: Any = None
    failure: Failure | None = None
    lingers: bool = False  # the code did not end with its time: a thread, or a task that is not to be cancelled
    pending: str = ""  # the rewards that a cancelled call waited for


class Calls:
    """`mark(number)` is told whose turn it is whenever async code of call `number` runs, and 0 afterwards."""

    def __init__(self, timeout_s: float, mark: Callable[[int], None]) -> None:
        self.timeout_s = timeout_s
        self.mark = mark
        self._threads = asyncio.Semaphore(MAX_THREADS)

    async def run(
        self, number: int, function: Callable[..., Any], arguments: list[Any], on_start: Callable[[], None]
    ) -> Outcome:
        """Call `function`, sync or async. `on_start` is called when the time begins to run."""
        if inspect.iscoroutinefunction(function):
            on_start()
            return await self._run_async(number, function(*arguments))
        async with self._threads:
            on_start()
            outcome = await self._run_sync(function, arguments)
        if inspect.isawaitable(outcome.value):  # a plain function that returns a coroutine
            return await self._run_async(number, outcome.value)
        return outcome

    async def play(self, number: int, episode: Coroutine[Any, Any, Any], clock: Clock) -> Outcome:
        """Run an episode for as long as its clock lets it. Who cancels this cancels the episode."""
        steps = _awaited(episode)
        task = asyncio.ensure_future(_settled(_Marked(steps, self.mark, number), number))
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

    async def _run_async(self, number: int, awaitable: Awaitable[Any]) -> Outcome:
        steps = _awaited(awaitable)
        task = asyncio.ensure_future(_settled(_Marked(steps, self.mark, number), number))
        done, _ = await asyncio.wait([task], timeout=self.timeout_s)
        if done:
            return task.result()
        return await _cancelled(task, hung_at(over_limit(self.timeout_s), _suspended_at(steps)))

    def make_task(self, loop: asyncio.AbstractEventLoop, steps: Any, **options: Any) -> asyncio.Task[Any]:
        """A task factory: tasks that the code of a call starts are marked as that call."""
        if (number := CALL.get()) and inspect.iscoroutine(steps):
            steps = _awaited(_Marked(steps, self.mark, number))
        return asyncio.Task(steps, loop=loop, **options)

    async def _run_sync(self, function: Callable[..., Any], arguments: list[Any]) -> Outcome:
        thread, ended = _start_thread(function, arguments)
        done, _ = await asyncio.wait([ended], timeout=self.timeout_s)
        if done:
            return ended.result()
        frame = sys._current_frames().get(thread.ident or 0)
        failure = hung_at(over_limit(self.timeout_s), traceback.extract_stack(frame))
        return Outcome(failure=failure, lingers=True)


async def _cancelled(task: asyncio.Task[Outcome], failure: Failure) -> Outcome:
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=CANCEL_S)
    if done and not task.cancelled() and (pending := task.result().pending):
        failure = replace(failure, reason=f"{failure.reason}; {pending}")
    return Outcome(failure=failure, lingers=not done)


def over_limit(timeout_s: float) -> str:
    return f"the score took longer than env.score_timeout_s = {timeout_s:g} s"


def _start_thread(
    function: Callable[..., Any], arguments: list[Any]
) -> tuple[threading.Thread, asyncio.Future[Outcome]]:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Outcome] = loop.create_future()

    def body() -> None:
        try:
            outcome = Outcome(function(*arguments))
        except BaseException as error:
            outcome = Outcome(failure=failure_of(error))
        if not loop.is_closed():
            loop.call_soon_threadsafe(ended.set_result, outcome)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread, ended


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
    except RewardsPending as error:
        return Outcome(failure=failure_of(error), pending=str(error))
    except BaseException as error:  # SystemExit would end the event loop, CancelledError a call that was not cancelled
        return Outcome(failure=failure_of(error))


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


class _Marked:
    """A coroutine that says when it is its turn: what blocks the event loop can then be named from outside."""

    def __init__(self, steps: Coroutine[Any, Any, Any], mark: Callable[[int], None], number: int) -> None:
        self.steps = steps
        self.mark = mark
        self.number = number

    def __await__(self) -> Generator[Any, Any, Any]:
        resume: Callable[[Any], Any] = self.steps.send
        value: Any = None
        while True:
            self.mark(self.number)
            try:
                waited_for = resume(value)
            except StopIteration as end:
                return end.value
            finally:
                self.mark(0)
            try:
                value = yield waited_for
                resume = self.steps.send
            except BaseException as error:
                resume, value = self.steps.throw, error
