"""Sync functions within their limits: in threads that are used again, or left behind."""

import asyncio
import threading
import time

import pytest

from tandem.isolation.clock import Limit, within
from tandem.isolation.failures import TimedOut
from tandem.isolation.threads import Threads, try_within
from tandem.utils.errors import UserError

LIMIT = Limit(0.1, "it took longer than 0.1 s")


def hangs(released: threading.Event) -> None:
    released.wait(30)


def gives_up() -> None:
    raise TimeoutError("its own")


def test_who_hangs_is_left_behind_with_its_place_and_keeps_nobody_waiting() -> None:
    released = threading.Event()

    async def run() -> None:
        threads = Threads(1, "user's code")
        first = await threads.run(LIMIT, threading.get_ident)
        assert await threads.run(LIMIT, threading.get_ident) == first, "used again"
        with pytest.raises(TimedOut, match=r"^it took longer than 0\.1 s \(test_threads\.py:\d+ in hangs\)$") as raised:
            await threads.run(LIMIT, hangs, released)
        assert raised.value.failure.fault == "time"
        assert await threads.run(LIMIT, threading.get_ident) != first
        threads.close()

    asyncio.run(run())
    released.set()


def test_what_a_function_raises_is_its_own() -> None:
    async def run() -> None:
        threads = Threads(1, "user's code")
        with pytest.raises(TimeoutError, match="its own"):
            await threads.run(Limit(30, "ours"), gives_up)
        with pytest.raises(TimeoutError, match="its own"):
            await within(Limit(30, "ours"), asyncio.wait_for(threads.run(Limit(30, "ours"), gives_up), 30))
        threads.close()

    asyncio.run(run())


def test_waiting_for_a_thread_is_not_counted() -> None:
    async def run() -> None:
        threads = Threads(1, "user's code")
        await asyncio.gather(*(threads.run(Limit(0.3, "too long"), time.sleep, 0.1) for _ in range(5)))
        threads.close()

    asyncio.run(run())


def test_a_trial_that_hangs_is_refused_and_says_where() -> None:
    released = threading.Event()
    with pytest.raises(UserError, match=r"(?s)^mine cannot be used: it took longer .*test_threads\.py:\d+ in hangs"):
        try_within(0.1, "mine", hangs, released)
    released.set()
    with pytest.raises(TimeoutError, match="its own"):
        try_within(30, "mine", gives_up)
    assert try_within(30, "mine", max, 1, 2) == 2
