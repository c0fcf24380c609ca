"""Any dataset as an environment, without Python: columns for prompt and answer, and a reward by name (`env.reward`).

[orchestrator.env]
id = "dataset"
args = { path = "questions.jsonl", prompt = "question", answer = "solution", held_out = 0.1 }
reward = "exact_match"
"""

import json
import math
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from tandem.config.base import Config
from tandem.config.data import SourceConfig
from tandem.data.conversations import read_prompt
from tandem.data.rows import RowSource, open_source
from tandem.rewards.config import is_pattern
from tandem.rewards.functions import exact_match
from tandem.types.rollout import Task
from tandem.utils.errors import UserError, shown


def number_or_fraction(held_out: float) -> float:
    """The value, if it is a whole number of rows or a fraction below 1. Raises ValueError."""
    is_positive = isinstance(held_out, int | float) and held_out is not True and 0 < held_out < math.inf
    if not is_positive or (held_out > 1 and held_out != int(held_out)):
        shown = f"{held_out:g}" if is_positive else repr(held_out)
        raise ValueError(f"held_out = {shown} is neither a whole number of rows nor a fraction below 1")
    return held_out


HeldOut = Annotated[float, Field(gt=0, allow_inf_nan=False), AfterValidator(number_or_fraction)]


class DatasetArgs(Config):
    path: str
    """A .jsonl, .json, .csv or .parquet file, a directory written by save_to_disk, or a name on the Hugging Face
    hub."""

    name: str | None = None
    """Configuration of a dataset on the hub that has several."""

    split: str | None = None
    """Split of a dataset that has several; None: train."""

    prompt: str = "prompt"
    """Column with the prompt: text, or a list of messages."""

    answer: str = "answer"
    """Column with the right answer. It is given to the reward function as text; anything but text as JSON."""

    answer_pattern: str | None = None
    """Regular expression for the part of the answer that counts: its first group, or all of it. GSM8K: '#### (.*)'."""

    eval_path: str | None = None
    """Dataset with the held-out tasks; the same formats."""

    eval_split: str | None = None
    """Split with the held-out tasks: of eval_path, or of path."""

    held_out: HeldOut = 0.1
    """Without these two: rows to hold out, a number or a fraction below 1."""

    max_tasks: int | None = Field(default=None, ge=2)
    """Take no more rows than this. None: all."""

    seed: int = 0
    """Which rows are held out."""

    _checked = field_validator("answer_pattern")(is_pattern)


class DatasetEnvironment:
    """Scored by exact match, unless `env.reward` names another function."""

    Args = DatasetArgs

    def __init__(self, **args: object) -> None:
        self.args = self.Args.model_validate(args)
        rows = list(self._read(self.args.path, self.args.split, "env.args.path"))
        if self.args.eval_path is not None or self.args.eval_split is not None:
            key = "env.args.eval_path" if self.args.eval_path else "env.args.path"
            eval_rows = list(self._read(self.args.eval_path or self.args.path, self.args.eval_split, key))
        else:
            rows, eval_rows = hold_out(rows, self.args.held_out, self.args.seed)
        tasks = [self._task(index, where, row) for index, (where, row) in enumerate([*rows, *eval_rows])]
        self.train_tasks, self.eval_tasks = tasks[: len(rows)], tasks[len(rows) :]

    def score(self, task: Task, completion: str) -> float:
        return exact_match(completion, task.answer)

    def _read(self, path: str, split: str | None, key: str) -> Iterator[tuple[str, Any]]:
        name = self.args.name if path == self.args.path else None
        source: RowSource = open_source(SourceConfig(path=path, name=name, split=split), key, streaming=False)
        for number, row in enumerate(source.read()):
            if number == self.args.max_tasks:
                return
            if row.problem or not isinstance(row.value, dict):
                raise UserError(f"{source.where(row)}: {row.problem or 'a row must be a table'}")
            yield source.where(row), row.value

    def _task(self, index: int, where: str, row: Mapping[str, Any]) -> Task:
        for option in ("prompt", "answer"):
            column = getattr(self.args, option)
            if row.get(column, "") is None:
                raise UserError(f"{where}: {column!r} (env.args.{option}) is null; give it a value, or drop the row")
            if column not in row:
                raise UserError(
                    f"{where} has no {column!r} (env.args.{option} = {column!r}); it has {', '.join(sorted(row))}"
                )
        try:
            messages = read_prompt(row[self.args.prompt])
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        return Task(index, messages, self._answer(row[self.args.answer], where), info=dict(row))

    def _answer(self, answer: Any, where: str) -> str:
        text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
        if self.args.answer_pattern is None:
            return text
        found = re.search(self.args.answer_pattern, text)
        if found is None:
            raise UserError(f"{where}: env.args.answer_pattern = {self.args.answer_pattern!r} is not in {text!r:.200}")
        return found[1 if found.re.groups else 0].strip()


def hold_out(rows: Sequence[Any], held_out: float, seed: int) -> tuple[list[Any], list[Any]]:
    """Rows to train on and rows held out: so many, or such a fraction, drawn at random."""
    number_or_fraction(held_out)
    if not rows:
        raise ValueError("there are no rows to make tasks of")
    if len(rows) == 1:
        raise ValueError("there is one row to make tasks of, and at least one is held out; add another")
    count = int(held_out) if held_out >= 1 else max(round(held_out * len(rows)), 1)
    if count >= len(rows):
        raise ValueError(f"held_out = {held_out:g} leaves none of {len(rows)} rows to train on; lower it")
    chosen = set(random.Random(f"{seed}/held out").sample(range(len(rows)), count))
    train = [row for place, row in enumerate(rows) if place not in chosen]
    return train, [rows[place] for place in sorted(chosen)]


def tasks_of(rows: Iterable[Any]) -> list[Task]:
    """Tasks as they are, or from rows with `prompt` and `answer`; what else a row has is in `info`."""
    tasks: list[Task] = []
    for index, row in enumerate(rows):
        if isinstance(row, Task):
            tasks.append(row)
            continue
        if not isinstance(row, Mapping) or "prompt" not in row:
            raise ValueError(f"row {index} is neither a Task nor a table with 'prompt' and 'answer': {shown(row)}")
        if row.get("answer", "") is None:
            raise ValueError(f"row {index}: 'answer' is None; give it a value, or leave it out")
        tasks.append(Task(index, read_prompt(row["prompt"]), str(row.get("answer", "")), info=dict(row)))
    return tasks
