"""Rewards that compute for long, in processes of their own: each call within its time limit, whatever its code does.

    score ─► a free worker ─► rewards/service.py ─► a number, or what went wrong
                │ over its time, or gone
                ▼
             the call fails; the worker is killed with all it started, and another takes its place

Called by rewards/weighted.py, in the environment's process.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.isolation.clock import Limit
from tandem.isolation.failures import UserCodeError
from tandem.isolation.process import WorkerProcess, WorkerSpec
from tandem.rewards.config import RewardConfig
from tandem.utils.errors import UserError
from tandem.utils.places import FailedElsewhere

SPEC = WorkerSpec(
    service="tandem.rewards.service:RewardService",
    name="its process",
    made="the process for rewards",
    startup_timeout_s=120.0,
    startup_hint="the machine may be overloaded",
    is_shared=False,
)


class RewardFailed(FailedElsewhere):
    """A reward function raised, took too long, or ended its process."""


def limit_of(config: RewardConfig) -> Limit:
    return Limit(config.timeout_s, f"{config.label} took longer than timeout_s = {config.timeout_s:g} s")


class RewardPool:
    """`score(2, …)` is the third of the `rewards`. For one event loop."""

    def __init__(self, rewards: Sequence[RewardConfig], size: int) -> None:
        self.rewards = rewards
        self._idle: list[WorkerProcess] = []
        self._slots = asyncio.Semaphore(size)

    async def score(self, number: int, arguments: Mapping[str, Any]) -> float:
        """The reward. Waiting for a worker, and its start, do not count as the reward's time."""
        config = self.rewards[number]
        async with self._slots:
            worker = self._idle.pop() if self._idle else await self._start()
            try:
                return await worker.call({"reward": number, "arguments": arguments}, limit_of(config))
            except UserCodeError as error:
                failure = error.failure
                if failure.fault == "time":
                    raise RewardFailed(failure.reason) from None
                if failure.fault in ("crash", "memory"):
                    how = worker.exit or "nothing, and was killed"
                    raise RewardFailed(f"{config.label} ended its process with {how}") from None
                raise RewardFailed(f"{config.label}: {failure.reason}", failure.where) from None
            except BaseException:  # cleans up: cancelled, or arguments that are no JSON
                worker.kill()
                raise
            finally:
                if worker.is_lost:
                    await worker.close()
                else:
                    self._idle.append(worker)

    async def close(self) -> None:
        while self._idle:
            worker = self._idle.pop()
            worker.kill()
            await worker.close()

    async def _start(self) -> WorkerProcess:
        worker = WorkerProcess(SPEC)
        try:
            await worker.start([config.model_dump(mode="json") for config in self.rewards])
        except UserError as error:
            await worker.close()
            raise RewardFailed(str(error)) from error
        except BaseException:  # cleans up
            worker.kill()
            await worker.close()
            raise
        return worker
