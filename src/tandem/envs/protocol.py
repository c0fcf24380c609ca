"""What an environment is: tasks to train on, tasks held out, and a judge. Called by the orchestrator."""

from collections.abc import Sequence
from typing import Protocol

from tandem.types.rollout import Task


class Environment(Protocol):
    """Single turn: one prompt, one completion, one reward."""

    @property
    def train_tasks(self) -> Sequence[Task]: ...

    @property
    def eval_tasks(self) -> Sequence[Task]: ...

    async def score(self, task: Task, completion: str) -> float:
        """The reward of a completion; may wait for other services."""
        ...
