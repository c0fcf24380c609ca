"""Rewards as objects with `score(prompt, response)`: ours by name, and whatever users bring."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property
from typing import Any, Protocol

from pydantic import ValidationError

from tandem.config.base import Config
from tandem.config.explain import explain_validation_error
from tandem.envs.protocol import Score
from tandem.envs.results import total
from tandem.isolation.clock import Limit
from tandem.isolation.failures import TimedOut
from tandem.isolation.threads import Threads
from tandem.python.data_buffer import Prompt
from tandem.python.reward_processes import RewardProcesses, num_processes
from tandem.rewards.calls import Call
from tandem.rewards.config import AnyReward, CodeConfig, CustomConfig, RewardConfig
from tandem.rewards.pool import RewardFailed
from tandem.rewards.registry import is_slow, make_call, require_installed
from tandem.rewards.weighted import WeightedRewards
from tandem.types.rollout import Task
from tandem.utils.errors import UserError

MAX_THREADS = 32  # calls of a user's reward under way, those that were given up not counted


class Scorer(Protocol):
    """A reward object; `score` may be async."""

    def score(self, prompt: str, response: str) -> Any: ...


class _Named(Config):
    """Where a reward stands in the messages about it."""

    reward: AnyReward


class Reward:
    """A reward of ours by its name and options, as in `[[orchestrator.env.rewards]]`: `Reward("numeric",
    tolerance=0.01)`. The right answer comes with the prompt.

    >>> Reward("numeric").score(Prompt("What is 2 + 2?", answer="4"), "It is 4.")
    1.0
    """

    def __init__(self, type: str, **options: Any) -> None:
        try:
            config = _Named.model_validate({"reward": {"type": type, **options}}).reward
        except ValidationError as error:
            raise UserError(f"Reward({type!r}): {explain_validation_error(_Named, error)}") from error
        require_installed(config.kind)
        make_call(config, make=False)
        self.config = config

    def score(self, prompt: str, response: str) -> Any:
        """A number; of rewards that ask a server or run code, something to await. What may take long is computed in a
        process of its own, within timeout_s."""
        prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
        task = Task(0, [{"role": "user", "content": str(prompt)}], prompt.answer, dict(prompt.info))
        arguments = self._call.arguments(task, response)
        if is_slow(self.config, self._call) and not isinstance(self.config, CustomConfig):
            return self.config.weight * self._processes.score(arguments)
        value = self._call(arguments)
        return self._weighted(value) if inspect.isawaitable(value) else self.config.weight * value

    async def _weighted(self, value: Awaitable[float]) -> float:
        return self.config.weight * await value

    @cached_property
    def _call(self) -> Call:
        return make_call(self.config)

    @cached_property
    def _processes(self) -> RewardProcesses:
        return RewardProcesses(self.config)


class MathReward(Reward):
    """1 where the last expression of the response, in \\boxed{} first, equals the answer, as math-verify sees it."""

    def __init__(self) -> None:
        super().__init__("math")


class RewardedTasks:
    """What the orchestrator's rollouts ask of an environment: the score of a completion, within a time limit.

    `reward`: an object with `score(prompt, response)`, a function of completion and answer, or a name of ours."""

    def __init__(
        self,
        reward: Scorer | Callable[..., Any] | str,
        timeout_s: float,
        train_tasks: Sequence[Task] = (),
        eval_tasks: Sequence[Task] = (),
    ) -> None:
        self.train_tasks = train_tasks
        self.eval_tasks = eval_tasks
        named = Reward(reward) if isinstance(reward, str) else reward
        if isinstance(named, Reward):  # as `rl` has it: what may take long in processes that can be killed
            self._scoring = WeightedRewards([_limited(named.config, timeout_s)], num_processes())
        else:
            self._scoring = CustomScoring(named, timeout_s)

    async def score(self, task: Task, completion: str) -> Score:
        score = await self._scoring.score(task, completion)
        return total(score) if isinstance(self._scoring, WeightedRewards) else score

    async def close(self) -> None:
        await self._scoring.close()


class CustomScoring:
    """A user's object or function, in this interpreter: awaited where it is async, in threads where it is not."""

    def __init__(self, reward: Scorer | Callable[..., Any], timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._call = _call_of(reward)
        self._limit = Limit(timeout_s, f"the reward took longer than reward_timeout_s = {timeout_s:g} s")
        self._threads = Threads(MAX_THREADS, "rewards")

    async def score(self, task: Task, completion: str) -> Score:
        if self._call.is_async:
            async with asyncio.timeout(self.timeout_s):
                return await self._score(task, completion)
        # In a thread: a reward that computes does not keep the next requests waiting.
        try:
            score = await self._threads.run(self._limit, self._score, task, completion)
        except TimedOut as error:
            raise RewardFailed(str(error)) from error
        if not inspect.isawaitable(score):
            return score
        async with asyncio.timeout(self.timeout_s):
            return await score

    async def close(self) -> None:
        """Calls that were given up end when they do, or with the program."""
        self._threads.close()

    def _score(self, task: Task, completion: str) -> Any:
        arguments = self._call.arguments(task, completion)
        return self._call(arguments | ({"prompt": Prompt.of(task)} if "prompt" in arguments else {}))


def _limited(config: RewardConfig, timeout_s: float) -> RewardConfig:
    """A timeout_s that it was given comes first."""
    has_limit = "timeout_s" in config.model_fields_set or isinstance(config, CodeConfig)  # which has one for a test
    return config if has_limit else config.model_copy(update={"timeout_s": timeout_s})


def _call_of(reward: Scorer | Callable[..., Any]) -> Call:
    if (score := getattr(reward, "score", None)) is not None:
        return Call(score, scores=True)
    if not callable(reward):
        raise UserError(f"reward = {reward!r} is neither a function, nor an object with score(prompt, response)")
    return Call(reward)
