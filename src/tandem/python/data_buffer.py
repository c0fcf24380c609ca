"""The prompts of a training run, in a shuffled order without end."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from tandem.config.explain import explain_validation_error
from tandem.envs.config import EnvConfig
from tandem.envs.protocol import has
from tandem.envs.registry import make_environment
from tandem.orchestrator.tasks import TaskOrder
from tandem.python.callables import custom_import_path, replace_callables
from tandem.rewards.calls import prompt_of
from tandem.types.rollout import Message, Task
from tandem.utils.errors import UserError, shown

Row = str | tuple[str, str] | Mapping[str, Any] | Task
"""A prompt; a prompt and its answer; a table with prompt (or messages), answer and info; or a Task."""


class Prompt(str):
    """What was asked last, as text, with what a reward may need besides: the right answer, and whatever the row said
    under info."""

    answer: str
    info: Mapping[str, Any]

    def __new__(cls, text: str, answer: str = "", info: Mapping[str, Any] | None = None) -> "Prompt":
        prompt = super().__new__(cls, text)
        prompt.answer = answer
        prompt.info = info or {}
        return prompt

    @classmethod
    def of(cls, task: Task) -> "Prompt":
        return cls(prompt_of(task.messages), task.answer, task.info)


class DataBuffer:
    """`sample(n)` gives the next `n` tasks: every one once, then every one again in another order.

    `eval_rows` are held out for evaluation. `position` counts what was given; set it to go on where another run was.
    Tasks whose places are in `set_aside` are left out.
    """

    def __init__(self, rows: Iterable[Row], seed: int = 0, *, eval_rows: Iterable[Row] = ()) -> None:
        self.tasks: Sequence[Task] = _tasks("rows", rows)
        if not self.tasks:
            raise UserError("DataBuffer has no rows; give at least one prompt")
        self.eval_tasks: Sequence[Task] = _tasks("eval_rows", eval_rows)
        self.env: EnvConfig | None = None  # whose reward, or whose episodes, count where no reward is given
        self.has_conversations = False
        self.order = TaskOrder(self.tasks, seed)

    @classmethod
    def from_env(cls, env: str | Mapping[str, Any] | Callable[..., Any], seed: int = 0) -> "DataBuffer":
        """The tasks of an environment, with its reward, or its conversations: a name (`reverse-text`,
        `./my_env.py:Mine`), a class, or the table that `[orchestrator.env]` would hold."""
        table = env if isinstance(env, Mapping) else {"id": env}
        try:
            config = EnvConfig.model_validate(replace_callables(table, custom_import_path))
        except ValidationError as error:
            raise UserError(f"DataBuffer.from_env: {explain_validation_error(EnvConfig, error)}") from error
        environment = make_environment(config)
        buffer = cls(environment.train_tasks, seed, eval_rows=environment.eval_tasks)
        buffer.env = config
        buffer.has_conversations = has(environment, "rollout")
        return buffer

    def __len__(self) -> int:
        return len(self.tasks)

    def sample(self, n: int) -> list[Task]:
        """The next `n` tasks; `n` need not divide anything."""
        if n < 0:
            raise UserError(f"sample({n}): give a whole number from 0 on")
        if n > 0 and self.order.is_exhausted:
            raise UserError(f"all {len(self)} tasks of the data buffer are set aside")
        return [self.order[self.order.take()] for _ in range(n)]

    @property
    def position(self) -> int:
        return self.order.position

    @position.setter
    def position(self, value: int) -> None:
        if value < 0:
            raise UserError(f"there is no task number {value}; give position a whole number from 0 on")
        self.order.position = value

    @property
    def set_aside(self) -> set[int]:
        return self.order.set_aside


def _tasks(name: str, rows: Iterable[Row]) -> list[Task]:
    if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
        raise UserError(f"{name} = {shown(rows)} is no list of rows; give one, as in [('2 + 2', '4')]")
    return [_task(number, row) for number, row in enumerate(rows)]


def _task(number: int, row: Row) -> Task:
    if isinstance(row, Task):
        return row
    if isinstance(row, str):
        row = {"prompt": row}
    elif isinstance(row, tuple) and len(row) == 2:
        prompt, answer = row
        row = {"prompt": prompt, "answer": answer}
    elif not isinstance(row, Mapping):
        raise UserError(
            f"row {number} is {shown(row)}; give a prompt, (prompt, answer), a table with prompt or messages, or a Task"
        )
    unknown = row.keys() - {"prompt", "messages", "answer", "info"}
    if unknown or ("prompt" in row) == ("messages" in row):
        keys = ", ".join(map(repr, row)) or "no keys"
        raise UserError(f"row {number} has {keys}; give prompt or messages, and answer and info where there are some")
    info = row.get("info") or {}
    if not isinstance(info, Mapping):
        raise UserError(f"row {number}: info = {shown(info)} is no table; give one")
    if row.get("answer", "") is None:
        raise UserError(f"row {number}: answer = None is no answer; give one, or leave it out")
    return Task(number, _messages(number, row), str(row.get("answer", "")), dict(info))


def _messages(number: int, row: Mapping[str, Any]) -> list[Message]:
    if "prompt" in row:
        if not isinstance(row["prompt"], str):
            raise UserError(f"row {number}: prompt = {shown(row['prompt'])} is no text; give one, or messages")
        return [{"role": "user", "content": row["prompt"]}]
    given = row["messages"]
    messages = list(given) if isinstance(given, Iterable) else []
    if not messages or not all(isinstance(message, Mapping) for message in messages):
        raise UserError(
            f"row {number}: messages = {shown(given)} is no list of messages; give one, as in "
            "[{'role': 'user', 'content': '2 + 2'}]"
        )
    return messages
