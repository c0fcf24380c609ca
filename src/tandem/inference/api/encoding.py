"""Where text becomes tokens: short texts on the event loop, long ones beside it, a few at a time.

A text of a megabyte takes a second; health checks and streams must not wait for it.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tandem.inference.api.errors import QueueFull

# Handing work to a thread costs more than encoding a text of this size.
SHORT = 2048
# Encoding takes a hundred times the memory of its text.
NUM_THREADS = 2
# Characters that may wait for a thread. Who waits holds the body of a request in memory.
MAX_WAITING = 128 << 20

T = TypeVar("T")


class Encoders:
    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, "encode")
        self._num_waiting = 0  # characters

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """The result of `work`, which encodes a text of `size` characters."""
        if size <= SHORT:
            return work()
        if self._num_waiting and self._num_waiting + size > MAX_WAITING:
            raise QueueFull(f"texts of {self._num_waiting >> 20} MiB wait to be encoded already; come back later")
        self._num_waiting += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._num_waiting -= size
