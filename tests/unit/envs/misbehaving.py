"""An environment whose tasks do what users' code does on a bad day: the answer of a task names it."""

import asyncio
import ctypes
import os
import re
import subprocess
import sys
import time
from typing import Any

from tandem.types.rollout import Task


class Misbehaving:
    def __init__(self, behaviours: list[str], eval_behaviours: tuple[str, ...] = ("good",)) -> None:
        self.train_tasks = [_task(number, behaviour) for number, behaviour in enumerate(behaviours)]
        self.eval_tasks = [_task(100 + number, behaviour) for number, behaviour in enumerate(eval_behaviours)]

    async def score(self, task: Task, completion: str) -> Any:
        if task.answer in REWARDS:
            return REWARDS[task.answer]
        if task.answer == "waits":
            await asyncio.sleep(0.5)
            return 0.5
        if task.answer == "awaits for ever":
            await asyncio.Event().wait()
        if task.answer == "refuses to be cancelled":
            while True:
                try:
                    await asyncio.sleep(1000)
                except asyncio.CancelledError:
                    continue
        return misbehave(task.answer)


class InTasks(Misbehaving):
    """Its code runs in tasks that a call starts, a moment after all calls have begun."""

    async def score(self, task: Task, completion: str) -> Any:
        (reward,) = await asyncio.gather(self._late(task, completion))
        return reward

    async def _late(self, task: Task, completion: str) -> Any:
        await asyncio.sleep(0.2)
        return await super().score(task, completion)


class InThreads(Misbehaving):
    """Its code runs in threads that a call waits for."""

    async def score(self, task: Task, completion: str) -> Any:
        return await asyncio.to_thread(Sync.score, self, task, completion)  # pyright: ignore[reportArgumentType]


class ClosesBadly(Misbehaving):
    def close(self) -> None:
        raise LookupError("nothing to close")


class Sync(Misbehaving):
    def score(self, task: Task, completion: str) -> Any:
        if task.answer in REWARDS:
            return REWARDS[task.answer]
        if task.answer == "waits":
            time.sleep(0.5)
            return 0.5
        return misbehave(task.answer)


async def never_rewards(completion: str, answer: str) -> float:
    await asyncio.Event().wait()
    return 0.0


def prints(completion: str, answer: str) -> float:
    """More than a buffer holds."""
    for stream in (sys.stdout, sys.stderr):
        print("\x1b]0;title\x07\x9b2J\r" + "x" * 10_000, file=stream)
    return 1.0


REWARDS: dict[str, Any] = {
    "good": 1.0,
    "nan": float("nan"),
    "infinite": float("-inf"),
    "none": None,
    "text": "0.7",
    "1e308": 1e308,
}


def misbehave(behaviour: str) -> float:
    if behaviour == "prints":
        return prints("", "")
    if behaviour == "raises":
        raise KeyError("no such key")
    if behaviour == "raises half a character":
        raise ValueError("no number in \ud83d")
    if behaviour == "raises a novel":
        raise ValueError("x" * 200_000)
    if behaviour == "recurses":
        return misbehave(behaviour)
    if behaviour == "exits":
        sys.exit(3)
    if behaviour == "interrupts":
        raise KeyboardInterrupt
    if behaviour == "cancels":
        raise asyncio.CancelledError
    if behaviour == "sleeps":
        time.sleep(1000)
    if behaviour == "spins":
        while True:
            pass
    if behaviour == "holds the interpreter":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if behaviour == "dies":
        os._exit(7)
    if behaviour == "crashes":
        ctypes.string_at(0)
    if behaviour == "waits for a child":
        subprocess.run(["sleep", "1000"], check=False)
    raise AssertionError(behaviour)


def _task(index: int, behaviour: str) -> Task:
    return Task(index, [{"role": "user", "content": "x"}], behaviour, info={"only here": object()})
