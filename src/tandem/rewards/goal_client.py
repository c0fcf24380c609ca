"""Client of goal-space servers: a text in, its place in goal space out.

place(text) ─► known already? ─► waits a moment for others ─► a chunk ─► the least busy server ─► checked
"""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from tandem.rewards.cache import AnswerCache
from tandem.rewards.checked import BadReward, checked_reward
from tandem.rewards.servers import BadAnswer, Servers

Vector = tuple[float, ...]
# How long a text waits for others that are asked for at the same time.
LINGER_S = 0.005


class GoalClient:
    """`goals` are the coordinates of what comes back. For one event loop; closed with `close`."""

    def __init__(
        self,
        servers: Servers,
        goals: Sequence[str],
        *,
        chunk_size: int,
        cache_size: int,
    ) -> None:
        self.servers = servers
        self.goals = goals
        self.chunk_size = chunk_size
        self._cache: AnswerCache[Vector] = AnswerCache(cache_size)
        self._waiting: list[tuple[str, asyncio.Future[Vector]]] = []
        self._sending: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    async def place(self, text: str) -> Vector:
        """Raises RewardServerError where no server places it."""
        return await self._cache.get(text, lambda: self._queue(text))

    async def place_all(self, texts: Sequence[str]) -> list[Vector]:
        return await asyncio.gather(*(self.place(text) for text in texts))

    async def close(self) -> None:
        for task in self._sending:
            task.cancel()
        await self.servers.close()

    async def _queue(self, text: str) -> Vector:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Vector] = loop.create_future()
        self._waiting.append((text, future))
        if len(self._waiting) >= self.chunk_size:
            self._flush()
        elif self._timer is None:
            self._timer = loop.call_later(LINGER_S, self._flush)
        return await future

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        chunk, self._waiting = self._waiting, []
        task = asyncio.ensure_future(self._send(chunk))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _send(self, chunk: list[tuple[str, asyncio.Future[Vector]]]) -> None:
        body = {"texts": [text for text, _ in chunk], "normalize": True}
        try:
            vectors = await self.servers.ask("/goalspace", body, lambda content: self._read(content, len(chunk)))
        except BaseException as error:  # answers: every text that was waited for
            for _, future in chunk:
                if not future.done():
                    future.set_exception(error) if isinstance(error, Exception) else future.cancel()
            if not isinstance(error, Exception):
                raise
            return
        for (_, future), vector in zip(chunk, vectors, strict=True):
            if not future.done():
                future.set_result(vector)

    def _read(self, content: bytes, num_expected: int) -> Iterable[Vector]:
        answer: dict[str, list[Any]] = orjson.loads(content)
        columns = [self._column(answer, goal, num_expected) for goal in self.goals]
        return zip(*columns, strict=True)

    def _column(self, answer: dict[str, list[Any]], goal: str, num_expected: int) -> list[float]:
        if goal not in answer:
            raise BadAnswer(f"knows no goal {goal!r}; it has {', '.join(answer) or 'none'}")
        values = answer[goal]
        if len(values) != num_expected:
            raise BadAnswer(f"gave {len(values)} values of {goal!r} for {num_expected} texts")
        try:
            return [checked_reward(value) for value in values]
        except BadReward as error:
            raise BadAnswer(f"gave no value of {goal!r}: {error}") from error
