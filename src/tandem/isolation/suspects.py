"""Finds the call that ends a worker process, where several ran at the same time.

All that ran are suspects. They run again before any other call, few at a time: innocent ones are answered, and the one
that ends the process alone is the culprit.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem.utils.gate import Gate

SHARE = 8  # one in so many suspects runs at a time: alone, of those that run in the threads of sync functions


class Suspects:
    def __init__(self) -> None:
        self._gate = Gate(None)
        self._num_open = 0
        self._none_open = asyncio.Event()
        self._none_open.set()

    def add(self, count: int) -> None:
        """One of so many."""
        self._gate.limit = max(1, count // SHARE)
        self._num_open += 1
        self._none_open.clear()

    def acquit(self) -> None:
        """The culprit is found: the others need not wait for each other."""
        self._gate.limit = None

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Of one that was added, and is a suspect until the end of this block."""
        try:
            await self._gate.enter(1)
            try:
                yield
            finally:
                self._gate.leave(1)
        finally:
            self._num_open -= 1
            if not self._num_open:
                self._none_open.set()

    async def wait_until_clear(self) -> None:
        """Until no suspect waits or runs."""
        await self._none_open.wait()

    @property
    def are_clear(self) -> bool:
        return self._none_open.is_set()
