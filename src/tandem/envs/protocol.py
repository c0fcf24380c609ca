"""What an environment is: tasks to train on, tasks held out, and either a reward function for single turns, `score`, or
whole conversations, `rollout`. Called by the orchestrator."""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Protocol

from tandem.envs.model import Model
from tandem.envs.results import Result
from tandem.types.rollout import Message, Task

Score = float | Mapping[str, float]
"""A reward, or rewards by name, of which the sum counts."""


def has(environment: Any, name: str) -> bool:
    """Whether a user's environment has this method. One that is None is not there."""
    return getattr(environment, name, None) is not None


class HasTasks(Protocol):
    """What every environment has. It may also have `setup` and `close`, sync or async: each is called once."""

    @property
    def train_tasks(self) -> Sequence[Task]: ...

    @property
    def eval_tasks(self) -> Sequence[Task]: ...


class UserEnvironment(HasTasks, Protocol):
    """What users write for single turns: one prompt, one completion, one reward."""

    def score(self, task: Task, completion: str) -> Score | Awaitable[Score]:
        """The reward of a completion: `async def`, which may wait for other services, or `def`, in a thread."""
        ...


class InteractiveEnvironment(HasTasks, Protocol):
    """What users write for conversations. Tools that it gives the model can be named in `tools`, which are then checked
    before anything starts."""

    async def rollout(self, task: Task, model: Model) -> Score | Result:
        """Play one episode: call `model.chat` as often as it takes, and say what it was worth."""
        ...


class ModelProxy(Protocol):
    """The model of one episode: answers its calls of `model.chat`."""

    def restart(self) -> None:
        """The episode begins anew: its process was lost through no fault of its own."""
        ...

    async def chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, max_tokens: int | None
    ) -> dict[str, Any]:
        """The model's next message; ContextFull or ChatRefused where there is none."""
        ...


class Environment(HasTasks, Protocol):
    """What the orchestrator sees of it (envs/process.py)."""

    async def score(self, task: Task, completion: str) -> Score:
        """The reward, within a time limit; UserCodeError where there is none."""
        ...


class MultiTurnEnv(Environment, Protocol):
    """What it sees of one whose rollouts may take several turns of the model."""

    async def play(self, task: Task, model: ModelProxy) -> Result:
        """One episode, within its time limits; UserCodeError where it comes to nothing."""
        ...
