"""The process in which an environment lives: `python -m tandem.envs.worker`, started and ended by envs/process.py.

Whatever users' code does here, hang, crash, exit, print, it does to this process, and the run goes on in another.

    reads    {"env": …, "path": …}                     once: what to make
             {"call": 7, "method": "score", "task": ["train", 3], "arguments": ["text"]}
    writes   {"ready": …} | {"refused": …}             once
             {"started": 7}, then {"call": 7, "value": …} | {"call": 7, "failure": …, "lingers": …}
"""

import asyncio
import faulthandler
import hashlib
import mmap
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import orjson

from tandem.config.orchestrator import EnvConfig
from tandem.envs.calls import Calls, Outcome
from tandem.envs.failures import Failure, failure_of, place_of
from tandem.envs.protocol import UserEnvironment
from tandem.envs.registry import make_environment
from tandem.envs.wire import Channel, Payload
from tandem.rewards.checked import BadReward, checked_reward
from tandem.types.rollout import Task
from tandem.utils.errors import UserError
from tandem.utils.processes import die_with_parent

STACK_SIGNAL = signal.SIGUSR1
MARK_BYTES = 8


class Worker:
    """Answers calls for as long as the other side is there."""

    def __init__(self, environment: UserEnvironment, config: EnvConfig, channel: Channel, mark: mmap.mmap) -> None:
        self.environment = environment
        self.tasks: dict[str, Sequence[Task]] = {"train": environment.train_tasks, "eval": environment.eval_tasks}
        self.timeout_s = config.score_timeout_s
        self.channel = channel
        self.mark = mark
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        calls = Calls(self.timeout_s, self._set_mark)

        def read() -> None:
            while (payload := self.channel.receive()) is not None:
                loop.call_soon_threadsafe(self._start, calls, payload)
            loop.call_soon_threadsafe(gone.set)

        threading.Thread(target=read, daemon=True).start()
        await gone.wait()

    def _start(self, calls: Calls, payload: Payload) -> None:
        task = asyncio.ensure_future(self._answer(calls, payload))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _answer(self, calls: Calls, payload: Payload) -> None:
        number = payload["call"]
        function: Callable[..., Any] = getattr(self.environment, payload["method"])
        split, position = payload["task"]
        arguments = [self.tasks[split][position], *payload["arguments"]]
        # The start is told before any of the user's code runs, which may be the last that is heard from here.
        outcome = await calls.run(number, function, arguments, lambda: self.channel.send({"started": number}))
        self.channel.send({"call": number} | reply(function, outcome))

    def _set_mark(self, number: int) -> None:
        self.mark[:MARK_BYTES] = number.to_bytes(MARK_BYTES, "big")


def reply(function: Callable[..., Any], outcome: Outcome) -> Payload:
    """The outcome of a score as it is sent. What is not a reward is a failure."""
    failure = outcome.failure
    if failure is None:
        try:
            return {"value": checked_reward(outcome.value)}
        except BadReward as error:
            failure = Failure(str(error), place_of(function))
    return {"failure": asdict(failure), "lingers": outcome.lingers}


def describe_tasks(environment: UserEnvironment) -> Payload:
    """What the orchestrator needs of the tasks; what only the scorer needs (`info`) stays here, whatever it is."""
    return {
        split: [{"index": task.index, "messages": task.messages, "answer": task.answer} for task in tasks]
        for split, tasks in (("train", environment.train_tasks), ("eval", environment.eval_tasks))
    }


def fingerprint(tasks: Payload) -> str:
    return hashlib.blake2b(orjson.dumps(tasks, option=orjson.OPT_SERIALIZE_NUMPY), digest_size=16).hexdigest()


def make(request: Payload) -> tuple[UserEnvironment | None, Payload]:
    """The environment and the answer to the request for it; without one, the answer says why."""
    config = EnvConfig.model_validate(request["env"])
    try:
        environment = make_environment(config)
        tasks = describe_tasks(environment)
        ready = {"fingerprint": fingerprint(tasks), "tasks": tasks if request["with_tasks"] else None}
    except UserError as error:
        return None, {"refused": str(error)}
    except BaseException as error:
        failure = failure_of(error)
        return None, {"refused": f"env.id = {config.id!r} cannot be created: {failure}\n{failure.frames}".rstrip()}
    return environment, {"ready": ready}


def main() -> None:
    parent, connection, mark, stacks = map(int, sys.argv[1:])
    if not die_with_parent(parent):
        raise SystemExit("the process that started this one is gone")
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach every process of a run; the orchestrator decides
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which children of users' code would inherit
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    channel = Channel(socket.socket(fileno=connection))
    request = channel.receive()
    if request is None:
        return
    sys.path[:] = request["path"]
    environment, answer = make(request)
    channel.send(answer)
    if environment is not None:
        worker = Worker(environment, EnvConfig.model_validate(request["env"]), channel, mmap.mmap(mark, MARK_BYTES))
        asyncio.run(worker.serve())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that users' code left behind do not hold this up


if __name__ == "__main__":
    main()
