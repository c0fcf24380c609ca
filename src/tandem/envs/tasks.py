"""The tasks of an environment, as users make them: read and checked once, before any of them is asked.

Called in the environment's process (envs/service.py), which sends what the orchestrator needs of them."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from numbers import Integral
from typing import Any

import orjson

from tandem.envs.config import EnvConfig
from tandem.envs.protocol import HasTasks
from tandem.isolation.wire import Payload
from tandem.types.rollout import Task
from tandem.utils.errors import UserError, shown

EXAMPLES = "docs/environments.md has examples"


def describe_tasks(environment: HasTasks, config: EnvConfig) -> Payload:
    """What the orchestrator needs of the tasks; what only the scorer needs (`info`) stays here, whatever it is."""
    return {split: _described(environment, f"{split}_tasks", config) for split in ("train", "eval")}


def fingerprint(tasks: Payload) -> str:
    return hashlib.blake2b(_as_json(tasks), digest_size=16).hexdigest()


def read_tasks(environment: HasTasks, name: str, config: EnvConfig) -> Sequence[Task]:
    """UserError where they are not what environments have."""
    try:
        tasks = getattr(environment, name)
    except AttributeError as error:
        if error.name != name:  # of the user's own code
            raise
        raise UserError(f"env.id = {config.id!r} has no `{name}`; {EXAMPLES}") from None
    if not _is_list(tasks):
        raise UserError(f"env.id = {config.id!r}: {name} is {_shown(tasks)}; make it a list of Tasks")
    numbers: dict[int, int] = {}  # the place of each task by its index
    for place, task in enumerate(each(tasks)):
        if not isinstance(task, Task):
            what = shown(task)
            raise UserError(f"env.id = {config.id!r}: {name}[{place}] is no tandem.types.rollout.Task but {what}")
        if problem := problem_of(task):
            raise UserError(f"env.id = {config.id!r}: {name}[{place}] is a Task whose {problem}")
        first = tasks[numbers.setdefault(task.index, place)]
        if first is not task and (first.messages, first.answer) != (task.messages, task.answer):
            raise UserError(
                f"env.id = {config.id!r}: {name}[{numbers[task.index]}] and {name}[{place}] are different Tasks with "
                f"index = {task.index}; give each an index of its own, by which samples and failures name it"
            )
    return tasks


def is_list_of_tasks(tasks: Any) -> bool:
    return _is_list(tasks) and all(isinstance(task, Task) and problem_of(task) is None for task in each(tasks))


def each(tasks: Sequence[Task]) -> Iterator[Task]:
    """As many as they say to be: not every lazy sequence, such as a dataset of torch, raises IndexError at its end."""
    return islice(tasks, len(tasks))


def problem_of(task: Task) -> str | None:
    """The field of a task that has the wrong type, with its value and the type it should have."""
    if not isinstance(task.index, Integral) or isinstance(task.index, bool):
        return f"index is {_shown(task.index)}; it must be an int"
    if not isinstance(task.messages, list):
        return f"messages are {_shown(task.messages)}; they must be a list of dicts with role and content"
    for number, message in enumerate(task.messages):
        if not isinstance(message, dict):
            return f"messages[{number}] is {_shown(message)}; it must be a dict with role and content"
        if not isinstance(message.get("role"), str):
            return f"messages[{number}] has the role {_shown(message.get('role'))}; it must be a str such as 'user'"
        if not isinstance(message.get("content"), str | list | None):
            return f"messages[{number}] has the content {_shown(message['content'])}; it must be a str"
    if not isinstance(task.answer, str):
        return f"answer is {_shown(task.answer)}; it must be a str: use str(…), or keep other types in info"
    if not isinstance(task.info, Mapping):
        return f"info is {_shown(task.info)}; it must be a dict"
    return None


def _described(environment: HasTasks, name: str, config: EnvConfig) -> list[Payload]:
    described = [
        {"index": task.index, "messages": task.messages, "answer": task.answer}
        for task in each(read_tasks(environment, name, config))
    ]
    try:
        _as_json(described)
    except TypeError:
        for place, task in enumerate(described):
            _require_json(task, f"env.id = {config.id!r}: {name}[{place}] is a Task whose index, messages or answer")
        raise
    return described


def _is_list(tasks: Any) -> bool:
    """Or the like; a generator would be empty the second time."""
    return hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")


def _require_json(task: Payload, what: str) -> None:
    try:
        _as_json(task)
    except TypeError as error:
        raise UserError(
            f"{what} cannot be written as JSON: {error}; keep what only the reward function needs in info"
        ) from error


def _as_json(value: Any) -> bytes:
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _shown(value: object) -> str:
    """With its type, which is what is wrong with it."""
    return f"{shown(value)} of type {type(value).__name__}"
