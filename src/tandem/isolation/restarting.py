"""One worker process at a time, for many calls: the next one takes over when it is lost.

call ──► the current process (process.py) ──► value
             │ lost
             ▼
the call that is to blame fails; all others run again in a new process, suspects first (suspects.py)
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from tandem.isolation.clock import Limit
from tandem.isolation.failures import Failure, UserCodeError
from tandem.isolation.process import WorkerLost, WorkerProcess
from tandem.isolation.suspects import Suspects
from tandem.isolation.wire import Ask, Payload
from tandem.utils.errors import UserError

logger = logging.getLogger(__name__)


class RestartingWorker:
    """`restart` starts another process; UserError where it cannot take the place of the first."""

    def __init__(self, worker: WorkerProcess, name: str, restart: Callable[[], Awaitable[WorkerProcess]]) -> None:
        self.worker = worker
        self.name = name  # of what the process runs: "environment"
        self._restart = restart
        self._replacing: asyncio.Task[None] | None = None
        self._suspects = Suspects()
        self._past_costs: Counter[str] = Counter()  # of processes that ended

    @property
    def costs(self) -> dict[str, float]:
        """What calls have cost since the start, by name."""
        costs = self._past_costs.copy()
        costs.update(self.worker.costs)
        return dict(costs)

    async def call(self, request: Payload, limit: Limit, begin: Callable[[], Ask] | None = None) -> Any:
        """The answer; UserCodeError where the call is to blame that there is none. `begin` is called whenever it
        begins, and gives what answers its questions."""

        async def answer(worker: WorkerProcess) -> Any:
            return await worker.call(request, limit, None if begin is None else begin())

        is_suspect = False
        while True:
            try:
                if is_suspect:
                    async with self._suspects.turn():
                        return await answer(await self._live_worker())
                worker = await self._live_worker()
                if self._suspects.are_clear:
                    return await answer(worker)
                await self._suspects.wait_until_clear()
            except WorkerLost as lost:
                is_suspect = lost.num_suspects > 0
                if is_suspect:
                    self._suspects.add(lost.num_suspects)

    async def close(self) -> None:
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait([self._replacing])
        await self.worker.close()

    async def _live_worker(self) -> WorkerProcess:
        """Another one, if this one is lost. Whoever asks first starts it, and it starts whether or not they go on
        waiting."""
        while self.worker.is_lost:
            if self._replacing is None or self._replacing.done():
                self._replacing = asyncio.ensure_future(self._replace())
            try:
                await asyncio.shield(self._replacing)
            except UserError as error:
                raise UserCodeError(Failure(f"the {self.name} cannot be created again: {error}")) from None
        return self.worker

    async def _replace(self) -> None:
        logger.warning("restarting the %s's process", self.name)
        await self.worker.close()
        if self.worker.has_culprit:
            self._suspects.acquit()
        self._past_costs.update(self.worker.costs)
        self.worker.costs = {}
        self.worker = await self._restart()
