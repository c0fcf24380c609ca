"""A process that computes rewards, one at a time (isolation/worker.py): what answers the calls of rewards/pool.py.

{"reward": 2, "arguments": {"completion": …, …}}     a number
"""

import asyncio
import inspect
from collections.abc import Awaitable
from functools import cache
from typing import Any

from pydantic import TypeAdapter

from tandem.isolation.calls import Calls, Outcome
from tandem.isolation.failures import Failure
from tandem.isolation.wire import Ask, Payload
from tandem.rewards.checked import checked_reward
from tandem.rewards.config import AnyReward
from tandem.rewards.pool import limit_of
from tandem.rewards.registry import make_call
from tandem.utils.places import one_line, user_place


class RewardService:
    """Made of the tables of all rewards. What is never asked for is never made."""

    name = "env.rewards"
    costs: dict[str, float] = {}

    def __init__(self, setup: list[Payload]) -> None:
        self.configs = TypeAdapter(list[AnyReward]).validate_python(setup)
        self._find = cache(lambda number: make_call(self.configs[number]))

    async def start(self) -> Payload:
        return {}

    async def answer(self, calls: Calls, number: int, request: Payload, ask: Ask) -> Outcome:
        reward = request["reward"]
        outcome = await calls.run(number, limit_of(self.configs[reward]), self._compute, reward, request["arguments"])
        return outcome if outcome.failure else outcome.value

    async def close(self) -> None: ...

    def _compute(self, reward: int, arguments: dict[str, Any]) -> Outcome:
        """In a thread, where it may run an event loop."""
        try:
            value = self._find(reward)(arguments)
            if inspect.isawaitable(value):  # a plain function that returns a coroutine
                value = asyncio.run(_awaited(value))
            return Outcome(checked_reward(value))
        except BaseException as error:  # answers: SystemExit, too, costs this call alone
            return Outcome(failure=Failure(one_line(error), user_place(error)))


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value
