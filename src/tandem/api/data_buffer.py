"""The prompts of a training run, in a shuffled order without end."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem.config.environment import EnvConfig
from tandem.envs.registry import make_environment
from tandem.orchestrator.tasks import TaskOrder
from tandem.rewards.calls import prompt_of
from tandem.types.rollout import Task
from tandem.utils.errors import UserError

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

    `position` counts what was given; set it to go on where another run was.
    """

    def __init__(self, rows: Iterable[Row], seed: int = 0) -> None:
        self.tasks: Sequence[Task] = [_task(number, row) for number, row in enumerate(rows)]
        if not self.tasks:
            raise UserError("DataBuffer has no rows; give at least one prompt")
        self.environment: Any = None  # whose reward counts where no other is given
        self.position = 0
        self._order = TaskOrder(self.tasks, seed)

    @classmethod
    def from_env(cls, env: str | Mapping[str, Any], seed: int = 0) -> "DataBuffer":
        """The training tasks of an environment, with its reward: a name (`reverse-text`, `./my_env.py:Mine`), or the
        table that `[orchestrator.env]` would hold. Single turns; conversations are for `rl`."""
        config = EnvConfig.model_validate({"id": env} if isinstance(env, str) else env)
        environment = make_environment(config)
        if not hasattr(environment, "score"):
            raise UserError(f"env.id = {config.id!r} has conversations, which need `rl`: tandem.rl(config)")
        buffer = cls(environment.train_tasks, seed)
        buffer.environment = environment
        return buffer

    def __len__(self) -> int:
        return len(self.tasks)

    def sample(self, n: int) -> list[Task]:
        """The next `n` tasks; `n` need not divide anything."""
        first = self.position
        self.position += n
        return [self._order[order] for order in range(first, first + n)]


def _task(number: int, row: Row) -> Task:
    if isinstance(row, Task):
        return row
    if isinstance(row, str):
        row = {"prompt": row}
    elif isinstance(row, tuple):
        prompt, answer = row
        row = {"prompt": prompt, "answer": answer}
    unknown = row.keys() - {"prompt", "messages", "answer", "info"}
    if unknown or ("prompt" in row) == ("messages" in row):
        raise UserError(
            f"row {number} has {', '.join(map(repr, row))}; give prompt or messages, and answer and info where there "
            "are some"
        )
    messages = row.get("messages") or [{"role": "user", "content": row["prompt"]}]
    return Task(number, list(messages), str(row.get("answer", "")), dict(row.get("info") or {}))
