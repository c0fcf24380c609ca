"""Time limits of calls: each is charged for its own code, and not for what others do to the event loop."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest

from tandem.isolation.calls import Calls, Outcome
from tandem.isolation.clock import FairLoop, Limit
from tandem.isolation.marks import SIZE_BYTES, Marks

LIMIT_S = 1.0
LIMIT = Limit(LIMIT_S, "it took longer")


@pytest.fixture
def marks() -> Iterator[Marks]:
    with tempfile.TemporaryFile() as file:
        file.truncate(SIZE_BYTES)
        marks = Marks(file.fileno())
        yield marks
        marks.close()


def run_all(marks: Marks, *functions: Callable[[], object]) -> list[Outcome]:
    """The outcomes of calls that run at the same time, in an event loop as the environment's process has it."""

    async def run() -> list[Outcome]:
        calls = Calls(marks)
        return await asyncio.gather(*(calls.run(number, LIMIT, one) for number, one in enumerate(functions, 1)))

    with asyncio.Runner(loop_factory=lambda: FairLoop(marks.turn)) as runner:
        return runner.run(run())


async def waits() -> float:
    for _ in range(3):
        await asyncio.sleep(0.01)
    return 0.5


async def waits_in_thread() -> float:
    return await asyncio.to_thread(waits_sync)


def waits_sync() -> float:
    time.sleep(0.05)
    return 0.5


async def blocks() -> float:
    time.sleep(1.5 * LIMIT_S)
    return 1.0


def test_who_waits_is_not_charged_for_the_time_that_another_blocks_the_event_loop(marks: Marks) -> None:
    waited: list[Callable[[], Awaitable[float] | float]] = [waits, waits_in_thread, waits_sync]
    *waiting, blocking = run_all(marks, *waited, blocks)
    assert [outcome.value for outcome in waiting] == [0.5] * 3
    assert blocking.value == 1.0, "it has ended: only the process's owner can end it sooner"


def test_who_blocks_the_event_loop_in_pieces_is_charged_for_all_of_them(marks: Marks) -> None:
    async def blocks_in_pieces() -> None:
        for _ in range(6):  # the second is over the limit; the event loop turns a few times until that is noticed
            time.sleep(0.6 * LIMIT_S)
            await asyncio.sleep(0)

    (outcome,) = run_all(marks, blocks_in_pieces)
    assert outcome.failure is not None and outcome.failure.fault == "time"
    assert outcome.failure.where.startswith("test_calls.py:")


def test_code_is_marked_as_its_calls_wherever_it_runs(marks: Marks) -> None:
    """In the event loop, in a task that the call starts, in a thread, and in one that it waits for."""

    async def in_loop() -> bool:
        await asyncio.sleep(0)
        return 1 in marks.running

    async def in_task() -> bool:
        async def later() -> bool:
            await asyncio.sleep(0)
            return 2 in marks.running

        return await asyncio.create_task(later())

    def in_thread() -> bool:
        return 3 in marks.running

    async def waits_for_thread() -> bool:
        return await asyncio.to_thread(lambda: 4 in marks.running)

    outcomes = run_all(marks, in_loop, in_task, in_thread, waits_for_thread)
    assert [outcome.value for outcome in outcomes] == [True] * 4
    assert marks.running == {}
