"""An environment in a process of its own: users' code can hang, crash or exit, and costs a rollout, not the run.

score, play ──► the current process (envs/worker_process.py) ──► reward
                    │ lost
                    ▼
the call that is to blame fails; all others run again in a new process, suspects first (isolation/suspects.py)
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

from tandem.config.environment import EnvConfig
from tandem.envs.protocol import Player, Score
from tandem.envs.results import Result
from tandem.envs.worker_process import WorkerLost, WorkerProcess
from tandem.isolation.failures import Failure, UserCodeError
from tandem.isolation.suspects import Suspects
from tandem.isolation.wire import Payload
from tandem.types.rollout import Task
from tandem.utils.errors import UserError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldTask(Task):
    """A task that lies in the environment's process, and where."""

    split: str = ""
    position: int = -1
    is_interactive: bool = False  # it is played, not scored
    tools: list[dict[str, Any]] | None = None  # that the model is given


def is_played(task: Task) -> TypeGuard[HeldTask]:
    return isinstance(task, HeldTask) and task.is_interactive


class EnvironmentProcess:
    """The environment as the orchestrator sees it."""

    def __init__(self, config: EnvConfig, worker: WorkerProcess, ready: Payload, name: str) -> None:
        self.config = config
        self.train_tasks = _held_tasks("train", ready, name)
        self.eval_tasks = _held_tasks("eval", ready, name)
        self._fingerprint = ready["fingerprint"]
        self._worker = worker
        self._replacing: asyncio.Task[None] | None = None
        self._suspects = Suspects()
        self._past_costs: Counter[str] = Counter()  # of processes that ended

    @property
    def costs(self) -> dict[str, float]:
        """What rewards have cost since the start, by name."""
        costs = self._past_costs.copy()
        costs.update(self._worker.costs)
        return dict(costs)

    async def score(self, task: Task, completion: str) -> Score:
        request = _request(task) | {"arguments": [completion]}
        return await self._until_answered(lambda worker: worker.score(request))

    async def play(self, task: Task, player: Player) -> Result:
        def play(worker: WorkerProcess) -> Awaitable[Payload]:
            player.restart()
            return worker.play(_request(task), player)

        return Result(**await self._until_answered(play))

    async def _until_answered(self, call: Callable[[WorkerProcess], Awaitable[Any]]) -> Any:
        is_suspect = False
        while True:
            try:
                if is_suspect:
                    async with self._suspects.turn():
                        return await call(await self._live_worker())
                worker = await self._live_worker()
                if self._suspects.are_clear:
                    return await call(worker)
                await self._suspects.wait_until_clear()
            except WorkerLost as lost:
                is_suspect = lost.num_suspects > 0
                if is_suspect:
                    self._suspects.add(lost.num_suspects)

    async def close(self) -> None:
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait([self._replacing])
        await self._worker.close()

    async def _live_worker(self) -> WorkerProcess:
        """Another one, if this one is lost. Whoever asks first starts it, and it starts whether or not they go on
        waiting."""
        while self._worker.is_lost:
            if self._replacing is None or self._replacing.done():
                self._replacing = asyncio.ensure_future(self._replace())
            try:
                await asyncio.shield(self._replacing)
            except UserError as error:
                raise UserCodeError(Failure(f"the environment cannot be created again: {error}")) from None
        return self._worker

    async def _replace(self) -> None:
        logger.warning("restarting the environment's process")
        await self._worker.close()
        if self._worker.has_culprit:
            self._suspects.acquit()
        self._past_costs.update(self._worker.costs)
        self._worker.costs = {}
        worker = WorkerProcess(self.config)
        try:
            ready = await worker.start(with_tasks=False)
            if ready["fingerprint"] != self._fingerprint:
                raise UserError("its tasks changed; creating it twice must give the same tasks")
        except BaseException:
            await worker.close()
            raise
        self._worker = worker


@asynccontextmanager
async def open_environment(config: EnvConfig, name: str = "") -> AsyncIterator[EnvironmentProcess]:
    """The environment that `config` names, ended with the block; UserError if it cannot be made. Its tasks have its
    name in a mixture."""
    worker = WorkerProcess(config)
    environment = None
    try:
        environment = EnvironmentProcess(config, worker, await worker.start(with_tasks=True), name)
        yield environment
    finally:
        await (environment or worker).close()


def _held_tasks(split: str, ready: Payload, name: str) -> list[HeldTask]:
    shared = {"split": split, "environment": name, "is_interactive": ready["is_interactive"], "tools": ready["tools"]}
    return [
        HeldTask(**described, **shared, position=position) for position, described in enumerate(ready["tasks"][split])
    ]


def _request(task: Task) -> Payload:
    assert isinstance(task, HeldTask), "a task of another environment"
    return {"task": [task.split, task.position]}
