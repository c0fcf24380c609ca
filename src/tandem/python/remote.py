"""Workers on other nodes, each as the pool of samplers sees it."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from tandem.isolation.clock import Limit
from tandem.isolation.failures import TimedOut
from tandem.isolation.threads import Threads
from tandem.launch.ray.cluster import WorkerDied
from tandem.python.pool import Job, SamplerGone
from tandem.types.rollout import Completion
from tandem.utils.errors import UserError, shorten

COMPLETIONS = TypeAdapter(list[list[Completion]])


class Worker(Protocol):
    """What RemoteRolloutManager asks of a worker; those of `Cluster.start` have it. See docs/python.md for what the
    messages are."""

    @property
    def name(self) -> str: ...

    def call(self, message: dict[str, Any]) -> dict[str, Any]:
        """Send a message and wait for the answer. Raises WorkerDied."""
        ...

    def restart(self) -> bool:
        """After it died: whether it was started again."""
        ...


class RemoteSampler:
    """A worker as the pool sees it: one message at a time. One that does not answer within `timeout_s` is gone."""

    slots = 1

    def __init__(self, worker: Worker, first_message: dict[str, Any], timeout_s: float) -> None:
        self.worker = worker
        self.first_message = first_message
        self.timeout_s = timeout_s
        self._thread = Threads(1, worker.name)
        self._turn = asyncio.Lock()
        self._is_open = False

    @property
    def name(self) -> str:
        return self.worker.name

    async def open(self) -> None:
        """Returns when the worker has its engine."""
        async with self._turn:
            await self._open()

    async def sample(self, jobs: Sequence[Job]) -> list[list[Completion]]:
        asked = [{"prompt_ids": job.prompt_ids, "sampling": asdict(job.sampling)} for job in jobs]
        answer = await self._call({"cmd": "generate", "prompts": asked})
        if "completions" not in answer:
            raise UserError(
                f"{self.name} answered `generate` with {shorten(str(answer), 200)}; whoever sends it messages has to "
                "receive their answers"
            )
        try:
            completions = COMPLETIONS.validate_python(answer["completions"])
        except ValidationError as error:
            raise UserError(
                f"{self.name} answered `generate` with completions = {shorten(repr(answer['completions']), 200)}; give "
                "a list for each prompt, of tables with token_ids, logprobs, versions and finish_reason"
            ) from error
        if [len(group) for group in completions] != [job.sampling.n for job in jobs]:
            raise SamplerGone(
                f"{self.name} answered {len(jobs)} prompts with {list(map(len, completions))} completions"
            )
        return completions

    async def load(self, path: Path, version: int) -> None:
        await self._call({"cmd": "update_weights", "path": str(path.resolve()), "version": version})

    async def revive(self) -> bool:
        async with self._turn:
            if not await self._in_time("restart", self.worker.restart):
                return False
            await self._open()
        return True

    def close(self) -> None:
        """Whoever started the worker ends it."""
        self._thread.close()

    async def _open(self) -> None:
        await self._exchange(self.first_message)
        self._is_open = True

    async def _call(self, message: dict[str, Any]) -> dict[str, Any]:
        async with self._turn:
            if not self._is_open:  # who waited for this turn must not meet a worker that has just been started again
                raise SamplerGone(f"{self.name} died")
            return await self._exchange(message)

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        try:
            answer = await self._in_time(message["cmd"], self.worker.call, message)
        except WorkerDied as error:
            self._is_open = False
            raise SamplerGone(str(error)) from error
        if not isinstance(answer, dict):
            raise UserError(
                f"{self.name} answered `{message['cmd']}` with {shorten(repr(answer), 200)}; every answer is a table"
            )
        if "error" in answer:
            raise UserError(f"{self.name}: {answer['error']}")
        return answer

    async def _in_time(self, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        limit = f"{self.name} has not answered `{what}` within worker_timeout_s = {self.timeout_s:g} s"
        try:
            return await self._thread.run(Limit(self.timeout_s, limit), function, *arguments)
        except TimedOut as error:
            self._is_open = False
            raise SamplerGone(error.failure.reason) from error
