"""An environment whose tasks all begin with the same system message (`env.system_prompt`)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from tandem.envs.tasks import each, is_list_of_tasks
from tandem.types.rollout import Task
from tandem.utils.errors import UserError


class SystemPrompted:
    """Everything but its tasks is that of `environment`."""

    def __init__(self, environment: Any, system_prompt: str) -> None:
        self._environment = environment
        self._system_prompt = system_prompt

    @cached_property
    def train_tasks(self) -> Sequence[Task]:
        return _with_system_message(self._environment.train_tasks, self._system_prompt)

    @cached_property
    def eval_tasks(self) -> Sequence[Task]:
        return _with_system_message(self._environment.eval_tasks, self._system_prompt)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._environment, name)


def _with_system_message(tasks: Sequence[Task], text: str) -> Sequence[Task]:
    """As they are where they are no tasks: whoever reads them says what is wrong."""
    if not is_list_of_tasks(tasks):
        return tasks
    for task in each(tasks):
        if any(message.get("role") == "system" for message in task.messages):
            raise UserError(
                f"env.system_prompt = {text!r}, but task {task.index} has a system message of its own; "
                "leave out one of the two"
            )
    return [replace(task, messages=[{"role": "system", "content": text}, *task.messages]) for task in each(tasks)]
