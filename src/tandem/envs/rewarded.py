"""An environment whose completions are scored by others than itself (`env.reward`, `env.rewards`).

Of a conversation, they score what the model said last."""

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from tandem.envs.protocol import has
from tandem.envs.results import Result, checked_result
from tandem.rewards.registry import RewardFunction
from tandem.types.rollout import Task


class Rewarded:
    """Everything but its score is that of `environment`. `costs` tells what scoring has cost so far."""

    def __init__(
        self, environment: Any, score: Callable[[Task, str], Any], costs: Callable[[], dict[str, float]] = dict
    ) -> None:
        self.reward_costs = costs
        self._environment = environment

        @functools.wraps(score)
        async def rollout(task: Task, model: Any) -> Result:
            played = checked_result(await environment.rollout(task, model))
            rewards = score(task, model.last_text)
            return Result(await rewards if inspect.isawaitable(rewards) else rewards, played.metrics, played.ended)

        if has(environment, "rollout"):
            self.rollout = rollout
        else:
            self.score = score

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


def by_answer(reward: RewardFunction) -> Callable[[Task, str], float | Awaitable[float]]:
    """A function of completion and answer as one of task and completion."""

    @functools.wraps(reward)  # what is said of a score that is no reward then names the function itself
    def score(task: Task, completion: str) -> float | Awaitable[float]:
        return reward(completion, task.answer)

    return score
