"""Texts of requests that wait at the same time are scored together.

requests ─► queue ─► worker: all that wait ─► one thread: scores ─► an answer for each
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

Tokens = Sequence[int]
ScoreAll = Callable[[list[Tokens]], list[float]]
Job = tuple[list[Tokens], asyncio.Future[list[float]]]


class Batcher:
    """Made inside a running event loop; `run` serves until it is cancelled."""

    def __init__(self, score_all: ScoreAll) -> None:
        self._score_all = score_all
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "scoring")  # always the same one: see `in_own_thread`

    async def score(self, sequences: list[Tokens]) -> list[float]:
        future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        await self._queue.put((sequences, future))
        return await future

    async def run(self) -> None:
        try:
            while True:
                jobs = [await self._queue.get()]
                while not self._queue.empty():
                    jobs.append(self._queue.get_nowait())
                # Whoever has gone away in the meantime needs no answer.
                jobs = [(sequences, future) for sequences, future in jobs if not future.done()]
                await self._answer(jobs)
        finally:
            self._thread.shutdown(wait=False)

    async def _answer(self, jobs: list[Job]) -> None:
        together = [sequence for sequences, _ in jobs for sequence in sequences]
        try:
            loop = asyncio.get_running_loop()
            scores = iter(await loop.run_in_executor(self._thread, self._score_all, together))
        except Exception as error:  # whatever the model raises, every request gets a reply
            for _, future in jobs:
                if not future.done():
                    future.set_exception(error)
            return
        for sequences, future in jobs:
            own = [next(scores) for _ in sequences]
            if not future.done():
                future.set_result(own)
