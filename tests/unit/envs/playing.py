"""Environments with conversations, good and bad: the answer of a task says what its episode does."""

import asyncio
import time
from pathlib import Path
from typing import Any

from tandem.envs.conversing import use_tools
from tandem.envs.model import Model
from tandem.envs.results import Result
from tandem.types.rollout import Task


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


class Playing:
    tools = (add,)

    def __init__(self, behaviours: list[str], trace: str = "") -> None:
        self.train_tasks = [_task(number, behaviour) for number, behaviour in enumerate(behaviours)]
        self.eval_tasks = [_task(100, "good")]
        self.trace = trace
        self.is_set_up = False

    async def setup(self) -> None:
        self.is_set_up = True
        self._note("setup")

    def close(self) -> None:
        self._note("close")

    def _note(self, text: str) -> None:
        if self.trace:
            with Path(self.trace).open("a") as file:
                file.write(text + "\n")

    async def rollout(self, task: Task, model: Model) -> Any:
        assert self.is_set_up
        reply = await model.chat(task.messages)
        if task.answer == "good":
            messages = [*task.messages, reply.message, {"role": "user", "content": "and then"}]
            reply = await model.chat(messages)
            rewards = {"length": float(len(reply.text)), "constant": 0.5}
            return Result(rewards, {"turns_played": 2}, "said_enough")
        if task.answer == "appends":
            task.messages.append(reply.message)
            task.messages[0]["content"] += "!"
            await model.chat(task.messages)
            return 1.0
        if task.answer == "tools":
            played = await use_tools(model, task.messages, self.tools)
            return played.result(1.0)
        if task.answer in RESULTS:
            return RESULTS[task.answer]
        if task.answer == "raises":
            raise LookupError("nothing there")
        if task.answer == "waits":
            await asyncio.Event().wait()
        if task.answer == "blocks":
            time.sleep(1000)
        if task.answer == "asks for ever":
            while True:
                await model.chat(task.messages)
        if task.answer == "bad messages":
            await model.chat([{"content": "no role"}])
        raise AssertionError(task.answer)


class Explosive(dict[str, float]):
    def items(self) -> Any:
        raise ArithmeticError("boom")

    def __bool__(self) -> bool:
        return True


RESULTS = {
    "nan": float("nan"),
    "none": None,
    "text": "1.0",
    "nan by name": {"fine": 1.0, "bad": float("nan")},
    "empty": {},
    "bad metric": Result(1.0, {"share": float("inf")}),
    "no metric": Result(1.0, {"share": None}),  # pyright: ignore[reportArgumentType]
    "bad end": Result(1.0, {}, ""),
    "by turn": Result(1.0, {}, "done", [0.25]),
    "bad turn": Result(1.0, {}, "done", [1.0, float("nan")]),
    "no turns": Result(1.0, {}, "done", 1.0),  # pyright: ignore[reportArgumentType]
    "explodes": Explosive(),
}


class NotAsync(Playing):
    def rollout(self, task: Task, model: Model) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return 1.0


def _task(index: int, behaviour: str) -> Task:
    return Task(index, [{"role": "user", "content": "x"}], behaviour)
