"""Answers that were waited for once: the same question asked again, even at the same time, is not asked twice."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class AnswerCache(Generic[T]):
    """The last `size` answers; errors are not remembered. For one event loop."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_hits = 0
        self._answers: OrderedDict[Hashable, asyncio.Future[T]] = OrderedDict()

    async def get(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        if self.size == 0:
            return await ask()
        if (known := self._answers.get(key)) is None:
            known = self._answers[key] = asyncio.ensure_future(ask())
            known.add_done_callback(lambda done: self._forget_error(key, done))
        else:
            self.num_hits += 1
            self._answers.move_to_end(key)
        while len(self._answers) > self.size:
            self._answers.popitem(last=False)
        return await asyncio.shield(known)  # others may wait for it, too

    def _forget_error(self, key: Hashable, done: asyncio.Future[T]) -> None:
        if (done.cancelled() or done.exception() is not None) and self._answers.get(key) is done:
            del self._answers[key]
