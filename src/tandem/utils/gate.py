"""A limit on how many run at the same time, which may change meanwhile."""

import asyncio
from collections import deque


class Gate:
    """Lets in what the limit allows, first come, first served. A request for more samples than that enters alone."""

    def __init__(self, limit: int | None) -> None:
        self.num_inside = 0
        self._limit = limit
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def limit(self) -> int | None:
        return self._limit

    @limit.setter
    def limit(self, limit: int | None) -> None:
        self._limit = limit
        self._admit()

    async def enter(self, count: int) -> None:
        if not self._waiting and self._has_room(count):
            self.num_inside += count
            return
        admitted = asyncio.get_running_loop().create_future()
        self._waiting.append((admitted, count))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():  # let in and called off at once
                self.leave(count)
            raise

    def leave(self, count: int) -> None:
        self.num_inside -= count
        self._admit()

    def _has_room(self, count: int) -> bool:
        return self._limit is None or self.num_inside == 0 or self.num_inside + count <= self._limit

    def _admit(self) -> None:
        while self._waiting:
            admitted, count = self._waiting[0]
            if not admitted.done():
                if not self._has_room(count):
                    return
                self.num_inside += count
                admitted.set_result(None)
            self._waiting.popleft()
