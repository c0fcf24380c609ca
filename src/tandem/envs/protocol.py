"""What an environment is: tasks to train on, tasks held out, and a reward function. Called by the orchestrator."""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from tandem.types.rollout import Task


class UserEnvironment(Protocol):
    """What users write. Single turn: one prompt, one completion, one reward."""

    @property
    def train_tasks(self) -> Sequence[Task]: ...

    @property
    def eval_tasks(self) -> Sequence[Task]: ...

    def score(self, task: Task, completion: str) -> float | Awaitable[float]:
        """The reward of a completion: `async def`, which may wait for other services, or `def`, in a thread."""
        ...


class Environment(Protocol):
    """What the orchestrator sees of it (envs/process.py)."""

    @property
    def train_tasks(self) -> Sequence[Task]: ...

    @property
    def eval_tasks(self) -> Sequence[Task]: ...

    async def score(self, task: Task, completion: str) -> float:
        """The reward, within a time limit; UserCodeError where there is none."""
        ...
