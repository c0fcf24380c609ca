"""Reverse-text: the prompt is a row of random letters, the answer is the same row backwards."""

import random

from pydantic import Field

from tandem.config.base import Config
from tandem.rewards.functions import positional_match
from tandem.types.rollout import Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class ReverseTextArgs(Config):
    min_length: int = Field(default=8, ge=1)
    max_length: int = Field(default=8, ge=1)
    num_train: int = Field(default=4096, ge=1)
    num_eval: int = Field(default=256, ge=1)
    seed: int = 0


class ReverseText:
    """Held-out rows never occur among the training rows."""

    Args = ReverseTextArgs

    def __init__(self, **args: object) -> None:
        self.args = self.Args.model_validate(args)
        if self.args.min_length > self.args.max_length:
            raise ValueError(f"min_length = {self.args.min_length} is above max_length = {self.args.max_length}")
        rows = self._distinct_rows(self.args.num_eval + self.args.num_train)
        tasks = [reverse_task(index, row) for index, row in enumerate(rows)]
        self.eval_tasks = tasks[: self.args.num_eval]
        self.train_tasks = tasks[self.args.num_eval :]

    async def score(self, task: Task, completion: str) -> float:
        return positional_match(completion, task.answer)

    def _distinct_rows(self, count: int) -> list[str]:
        possible = sum(len(LETTERS) ** n for n in range(self.args.min_length, self.args.max_length + 1))
        if possible < 2 * count:
            raise ValueError(
                f"num_train + num_eval = {count} distinct rows are needed, but lengths from "
                f"{self.args.min_length} to {self.args.max_length} give only {possible}; raise max_length"
            )
        draw = random.Random(self.args.seed)
        rows: dict[str, None] = {}
        while len(rows) < count:
            length = draw.randint(self.args.min_length, self.args.max_length)
            rows["".join(draw.choices(LETTERS, k=length))] = None
        return list(rows)


def reverse_task(index: int, row: str) -> Task:
    return Task(index=index, messages=[{"role": "user", "content": row}], answer=row[::-1])
