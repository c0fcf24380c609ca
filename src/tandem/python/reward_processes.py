"""Reward processes for callers without an event loop: `Reward.score`, wherever it is called."""

import asyncio
import threading
import weakref
from collections.abc import Mapping
from typing import Any

from tandem.rewards.config import RewardConfig
from tandem.rewards.pool import RewardPool
from tandem.utils.processes import usable_cores

MAX_PROCESSES = 8  # of one reward; each may hold its libraries


def num_processes() -> int:
    return min(MAX_PROCESSES, usable_cores())


class RewardProcesses:
    """Blocks, without holding the interpreter, until the reward is there or over its timeout_s. For any thread.

    A thread of its own starts the processes and talks to them: the kernel ends them with whatever thread started them.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._pool = RewardPool([config], num_processes())
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=_run, args=(self._loop,), name=f"reward {config.label}", daemon=True).start()
        weakref.finalize(self, _close, self._pool, self._loop)

    def score(self, arguments: Mapping[str, Any]) -> float:
        return asyncio.run_coroutine_threadsafe(self._pool.score(0, arguments), self._loop).result()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


def _close(pool: RewardPool, loop: asyncio.AbstractEventLoop) -> None:
    closing = asyncio.run_coroutine_threadsafe(pool.close(), loop)
    closing.add_done_callback(lambda _: loop.stop())  # in the loop's own thread
