"""An environment in a process of its own: users' code can hang, crash or exit, and costs a rollout, not the run.

The orchestrator's side; envs/service.py is the other, and isolation/ what lies between them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

from tandem.envs.config import EnvConfig
from tandem.envs.limits import score_limit, turn_limit
from tandem.envs.model import ChatRefused, ContextFull
from tandem.envs.protocol import ModelProxy, Score
from tandem.envs.results import Result
from tandem.isolation.process import WorkerProcess, WorkerSpec
from tandem.isolation.restarting import RestartingWorker
from tandem.isolation.wire import Ask, Payload
from tandem.types.rollout import Task
from tandem.utils.errors import UserError


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
    """The environment as the orchestrator sees it. `ready` is what its first process told of it."""

    def __init__(self, config: EnvConfig, worker: WorkerProcess, ready: Payload, name: str) -> None:
        self.config = config
        self.train_tasks = _held_tasks("train", ready, name)
        self.eval_tasks = _held_tasks("eval", ready, name)
        self._fingerprint = ready["fingerprint"]
        self._process = RestartingWorker(worker, "environment", self._restart)

    @property
    def costs(self) -> dict[str, float]:
        """What rewards have cost since the start, by name."""
        return self._process.costs

    async def score(self, task: Task, completion: str) -> Score:
        request = {"method": "score", "task": _place(task), "completion": completion}
        return await self._process.call(request, score_limit(self.config))

    async def play(self, task: Task, model: ModelProxy) -> Result:
        def begin() -> Ask:
            model.restart()
            return partial(_turn_of, model)

        request = {"method": "rollout", "task": _place(task)}
        return Result(**await self._process.call(request, turn_limit(self.config), begin))

    async def close(self) -> None:
        await self._process.close()

    async def _restart(self) -> WorkerProcess:
        worker = make_worker(self.config)
        try:
            ready = await worker.start(_setup(self.config, with_tasks=False))
            if ready["fingerprint"] != self._fingerprint:
                raise UserError("its tasks changed; creating it twice must give the same tasks")
        except BaseException:  # cleans up
            await worker.close()
            raise
        return worker


@asynccontextmanager
async def open_environment(config: EnvConfig, name: str = "") -> AsyncIterator[EnvironmentProcess]:
    """The environment that `config` names, ended with the block; UserError if it cannot be made. Its tasks have its
    name in a mixture."""
    worker = make_worker(config)
    environment = None
    try:
        ready = await worker.start(_setup(config, with_tasks=True))
        environment = EnvironmentProcess(config, worker, ready, name)
        yield environment
    finally:
        await (environment or worker).close()


def make_worker(config: EnvConfig) -> WorkerProcess:
    return WorkerProcess(
        WorkerSpec(
            service="tandem.envs.service:EnvironmentService",
            name="the environment's process",
            made=f"env.id = {config.id!r}",
            startup_timeout_s=config.startup_timeout_s,
            startup_hint="env.startup_timeout_s allows no more",
        )
    )


def _setup(config: EnvConfig, *, with_tasks: bool) -> Payload:
    return {"env": config.model_dump(mode="json"), "with_tasks": with_tasks}


def _held_tasks(split: str, ready: Payload, name: str) -> list[HeldTask]:
    shared = {"split": split, "environment": name, "is_interactive": ready["is_interactive"], "tools": ready["tools"]}
    return [
        HeldTask(**described, **shared, position=position) for position, described in enumerate(ready["tasks"][split])
    ]


def _place(task: Task) -> list[Any]:
    assert isinstance(task, HeldTask), "a task of another environment"
    return [task.split, task.position]


async def _turn_of(model: ModelProxy, asked: Payload) -> Payload:
    try:
        return await model.chat(asked["messages"], asked["tools"], asked["max_tokens"])
    except ContextFull as error:
        return {"context_full": str(error)}
    except ChatRefused as error:
        return {"refused": str(error)}
