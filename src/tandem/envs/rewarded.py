"""An environment whose completions another reward function scores (`env.reward`)."""

import functools
from collections.abc import Awaitable

from tandem.envs.protocol import UserEnvironment
from tandem.rewards.registry import RewardFunction
from tandem.types.rollout import Task


class Rewarded:
    def __init__(self, environment: UserEnvironment, reward: RewardFunction) -> None:
        self.train_tasks = environment.train_tasks
        self.eval_tasks = environment.eval_tasks

        @functools.wraps(reward)  # what is said of a score that is no reward then names the function itself
        def score(task: Task, completion: str) -> float | Awaitable[float]:
            return reward(completion, task.answer)

        self.score = score
