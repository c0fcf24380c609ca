"""Rewards as objects with `score(prompt, response)`: ours by name, and whatever users bring."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from tandem.api.data_buffer import Prompt
from tandem.config.rewards import AnyReward, RewardConfig
from tandem.envs.protocol import Score
from tandem.rewards.calls import Call
from tandem.rewards.registry import make_call, require_installed
from tandem.types.rollout import Task
from tandem.utils.errors import UserError


class Scorer(Protocol):
    """A reward object; `score` may be async."""

    def score(self, prompt: str, response: str) -> Any: ...


class Reward:
    """A reward of ours by its name and options, as in `[[orchestrator.env.rewards]]`: `Reward("numeric",
    tolerance=0.01)`. The right answer comes with the prompt.

    >>> Reward("numeric").score(Prompt("What is 2 + 2?", answer="4"), "It is 4.")
    1.0
    """

    def __init__(self, type: str, **options: Any) -> None:
        try:
            config: RewardConfig = TypeAdapter(AnyReward).validate_python({"type": type, **options})
        except ValidationError as error:
            problem = error.errors()[0]
            raise UserError(f"Reward({type!r}): {'.'.join(map(str, problem['loc'][1:]))} {problem['msg']}") from error
        require_installed(config)
        self._call = make_call(config)

    def score(self, prompt: str, response: str) -> Any:
        """A number; of rewards that ask a server, something to await."""
        prompt = prompt if isinstance(prompt, Prompt) else Prompt(prompt)
        task = Task(0, [{"role": "user", "content": str(prompt)}], prompt.answer, dict(prompt.info))
        return self._call(self._call.arguments(task, response))


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
        self.timeout_s = timeout_s
        self.train_tasks = train_tasks
        self.eval_tasks = eval_tasks
        self._call = _call_of(reward)

    async def score(self, task: Task, completion: str) -> Score:
        async with asyncio.timeout(self.timeout_s):
            if self._call.is_async:
                return await self._score(task, completion)
            # In a thread: a reward that computes does not keep the next requests waiting.
            score = await asyncio.to_thread(self._score, task, completion)
            return await score if inspect.isawaitable(score) else score

    def _score(self, task: Task, completion: str) -> Any:
        arguments = self._call.arguments(task, completion)
        return self._call(arguments | ({"prompt": Prompt.of(task)} if "prompt" in arguments else {}))


def _call_of(reward: Scorer | Callable[..., Any] | str) -> Call:
    reward = Reward(reward) if isinstance(reward, str) else reward
    if (score := getattr(reward, "score", None)) is not None:
        return Call(score, scores=True)
    if not callable(reward):
        raise UserError(f"reward = {reward!r} is neither a function, nor an object with score(prompt, response)")
    return Call(reward)
