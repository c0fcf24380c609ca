"""Rewards as users bring them, on good days and bad ones."""

import asyncio
import functools
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def brief(completion: str, answer: str, *, most: int = 10) -> float:
    return float(len(completion) <= most)


def asked(completion: str, answer: str, prompt: str, info: dict[str, Any]) -> float:
    return len(prompt) + info["bonus"]


async def waits(completion: str, answer: str) -> float:
    await asyncio.sleep(0.001)
    return 0.25


def returns_a_coroutine(completion: str, answer: str) -> Any:
    return waits(completion, answer)


class Called:
    """An object that is called, with an end of its own."""

    def __init__(self) -> None:
        self.is_closed = False

    async def __call__(self, completion: str, answer: str) -> float:
        return 0.125

    async def close(self) -> None:
        self.is_closed = True


async def gives_up(completion: str, answer: str) -> float:
    raise TimeoutError("the judge is asleep")


async def waits_for_ever(completion: str, answer: str) -> float:
    await asyncio.Event().wait()
    return 0.0


def misbehaves(completion: str, answer: str) -> Any:
    match completion:
        case "sleeps":
            time.sleep(1000)
        case "holds the interpreter":
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "dies":
            os._exit(7)
        case path if path.startswith("/"):
            with open(path, "w") as file:  # noqa: PTH123
                print(subprocess.Popen(["sleep", "1000"], start_new_session=True).pid, file=file)
            os._exit(7)
        case "hangs up":
            os.closerange(3, 100)
            time.sleep(1000)
        case path if path.startswith("at "):
            Path(path[3:]).touch()
            time.sleep(1000)
        case "is signalled":
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                os.kill(os.getpid(), number)
        case "exits":
            raise SystemExit(3)
        case "raises":
            raise KeyError("no such key")
        case "raises elsewhere":
            json.loads("{")
        case "raises half a character":
            raise ValueError("\ud83d")
        case "prints":
            print("to standard output \ud83d")
        case "leaves a thread":
            threading.Thread(target=time.sleep, args=(1000,)).start()
        case "nan":
            return float("nan")
        case "none":
            return None
        case "text":
            return "0.7"
    return 0.5


class Scorer:
    """An object with `score(prompt, response)`, as reward models have it."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    def score(self, prompt: str, response: str) -> float:
        return self.scale * len(prompt) / len(response)


class Counted:
    """Its score is how many of them there are in this process."""

    made = 0

    def __init__(self) -> None:
        Counted.made += 1

    async def score(self, prompt: str, response: str) -> float:
        return self.made


class AsyncScorer:
    async def score(self, prompt: str, response: str) -> float:
        return Scorer().score(prompt, response)


made = Scorer(3.0)
called = Called()
number = 3


def with_bonus(function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def call(completion: str, answer: str, info: dict[str, Any]) -> float:
        return function(completion, answer, bonus=info["bonus"])

    return call


def doubled(function: Callable[..., float]) -> Callable[..., float]:
    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> float:
        return function(*args, scale=2.0, **options)

    return call


@with_bonus
def decorated(completion: str, answer: str, bonus: float, prompt: str = "") -> float:
    return bonus + len(prompt)


@doubled
def decorated_for_any(completion: str, answer: str, scale: float, prompt: str, most: int = 9) -> float:
    return scale * min(most, len(prompt))


@functools.cache
def remembered(completion: str, answer: str, prompt: str) -> float:
    return float(len(prompt))
