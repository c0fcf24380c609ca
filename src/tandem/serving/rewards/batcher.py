"""Texts of requests that wait at the same time are scored together. Called by servers of reward models and of goals.

requests ─► queue ─► worker: all that wait ─► one thread: scores ─► an answer for each

Where that fails, each request is scored alone, so that a text costs only its own request.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Item = TypeVar("Item")  # a text, in letters or in tokens
Score = TypeVar("Score")  # a number, or one for each goal

Job = tuple[list[Item], asyncio.Future[list[Score]]]  # a request, and where its answer is awaited


class Batcher(Generic[Item, Score]):
    """Made inside a running event loop; `run` serves until it is cancelled."""

    def __init__(self, score_all: Callable[[list[Item]], list[Score]]) -> None:
        self._score_all = score_all
        self._queue: asyncio.Queue[Job[Item, Score]] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, "scoring")  # always the same one: see `in_own_thread`

    async def score(self, items: list[Item]) -> list[Score]:
        future: asyncio.Future[list[Score]] = asyncio.get_running_loop().create_future()
        await self._queue.put((items, future))
        return await future

    async def run(self) -> None:
        try:
            while True:
                jobs = [await self._queue.get()]
                while not self._queue.empty():
                    jobs.append(self._queue.get_nowait())
                # Whoever has gone away in the meantime needs no answer.
                jobs = [(items, future) for items, future in jobs if not future.done()]
                await self._answer(jobs)
        finally:
            self._thread.shutdown(wait=False)

    async def _answer(self, jobs: list[Job[Item, Score]]) -> None:
        together = [item for items, _ in jobs for item in items]
        try:
            loop = asyncio.get_running_loop()
            scores = iter(await loop.run_in_executor(self._thread, self._scored, together))
        except Exception as error:  # whatever the model raises, every request gets a reply
            for items, future in jobs:
                if future.done():
                    continue
                if len(jobs) > 1:
                    await self._answer([(items, future)])
                else:
                    future.set_exception(error)
            return
        for items, future in jobs:
            own = [next(scores) for _ in items]
            if not future.done():
                future.set_result(own)

    def _scored(self, items: list[Item]) -> list[Score]:
        """In the thread. What would end or cancel the worker that awaits it fails its request instead."""
        try:
            return self._score_all(items)
        except (SystemExit, asyncio.CancelledError) as error:
            raise RuntimeError(f"scoring raised {type(error).__name__}: {error}") from error


@asynccontextmanager
async def batching(score_all: Callable[[list[Item]], list[Score]]) -> AsyncIterator[Batcher[Item, Score]]:
    """A batcher that serves until the block ends."""
    batcher = Batcher(score_all)
    worker = asyncio.create_task(batcher.run())
    yield batcher
    worker.cancel()
