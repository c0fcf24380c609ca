"""Several rewards of one completion, each with its weight, its time limit and its name."""

import asyncio
from collections.abc import Sequence

from tandem.isolation.calls import CancelledWaiting
from tandem.isolation.clock import within
from tandem.isolation.failures import TimedOut
from tandem.rewards.calls import Call
from tandem.rewards.checked import BadReward, checked_reward
from tandem.rewards.config import CustomConfig, RewardConfig
from tandem.rewards.judge import Judge
from tandem.rewards.pool import RewardFailed, RewardPool, limit_of
from tandem.rewards.registry import is_slow, make_call, require_installed
from tandem.types.rollout import Task


class WeightedRewards:
    """`score` gives weight × reward, by name; the sum is what counts. For one event loop."""

    def __init__(self, configs: Sequence[RewardConfig], num_workers: int) -> None:
        self.configs = configs
        for config in configs:
            require_installed(config.kind)
        looked_at = [make_call(config, make=False) for config in configs]
        self._slow = [is_slow(config, call) for config, call in zip(configs, looked_at, strict=True)]
        self._calls = [
            call if slow else make_call(config)
            for config, call, slow in zip(configs, looked_at, self._slow, strict=True)
        ]
        self._pool = RewardPool(configs, num_workers)

    async def score(self, task: Task, completion: str) -> dict[str, float]:
        scoring = [asyncio.ensure_future(self._one(number, task, completion)) for number in range(len(self.configs))]
        try:
            rewards = await asyncio.gather(*scoring)
        except asyncio.CancelledError:
            waited_for = [one.label for one, scored in zip(self.configs, scoring, strict=True) if scored.cancelled()]
            raise CancelledWaiting(f"pending: {', '.join(waited_for)} of env.rewards") from None
        finally:
            for one in scoring:
                one.cancel()
        return {config.label: config.weight * reward for config, reward in zip(self.configs, rewards, strict=True)}

    def costs(self) -> dict[str, float]:
        """What those that cost something have cost so far, by name: "judge/calls", "judge/tokens", "judge/cost"."""
        return {
            f"{config.label}/{name}": value
            for config, call in zip(self.configs, self._calls, strict=True)
            if isinstance(call.function, Judge)
            for name, value in call.function.costs.items()
        }

    async def _one(self, number: int, task: Task, completion: str) -> float:
        config, call = self.configs[number], self._calls[number]
        arguments = call.arguments(task, completion)
        if self._slow[number]:
            return await self._pool.score(number, arguments)
        try:
            return checked_reward(await self._awaited(config, call, arguments) if call.is_async else call(arguments))
        except BadReward as error:
            raise BadReward(f"{config.label}: {error}") from error

    async def _awaited(self, config: RewardConfig, call: Call, arguments: dict[str, object]) -> object:
        if not isinstance(config, CustomConfig):  # ours keep time themselves: waiting for a free place does not count
            return await call(arguments)
        try:
            return await within(limit_of(config), call(arguments))
        except TimedOut as error:
            raise RewardFailed(error.failure.reason) from None

    async def close(self) -> None:
        await self._pool.close()
        for call in self._calls:
            if (close := getattr(call.function, "close", None)) is not None:
                await close()
