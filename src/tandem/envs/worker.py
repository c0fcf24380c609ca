"""The process in which an environment lives: `python -m tandem.envs.worker`, started and ended by
envs/worker_process.py.

Whatever users' code does here, hang, crash, exit, print, it does to this process, and the run goes on in another.

    reads    {"env": …, "path": …}                     once: what to make
             {"call": 7, "method": "score", "task": ["train", 3], "arguments": ["text"]}
             {"call": 8, "method": "rollout", "task": ["train", 4], "arguments": []}
             {"answer": 1, …}                          the model's next turn, for an episode that has asked
             {"cancel": 8}
    writes   {"ready": …} | {"refused": …}             once
             {"call": 7, "value": …} | {"call": 7, "failure": …, "lingers": …}, with "costs" where they changed
             {"ask": 1, "call": 8, "messages": …, …}   while the episode of call 8 is played

Nothing here waits for the other side to read: the event loop belongs to users' code. Where answers pile up, no further
calls are taken.
"""

import asyncio
import copy
import faulthandler
import inspect
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from tandem.config.environment import EnvConfig
from tandem.envs.limits import episode_limit, score_limit, turn_limit
from tandem.envs.model import RemoteModel
from tandem.envs.protocol import has
from tandem.envs.registry import make_environment
from tandem.envs.results import checked_result, checked_score
from tandem.envs.tasks import EXAMPLES, describe_tasks, fingerprint
from tandem.envs.tools import as_schema
from tandem.isolation.calls import CALLED_OFF, Calls, Outcome
from tandem.isolation.clock import Clock, FairLoop
from tandem.isolation.failures import Failure, failure_of, place_of
from tandem.isolation.marks import Marks
from tandem.isolation.wire import Payload, frame, messages, receive
from tandem.rewards.checked import BadReward
from tandem.types.rollout import Task
from tandem.utils.errors import UserError, shorten, shown
from tandem.utils.log import PrintableStream, make_errors_printable, say, setup_logging, write_what_the_terminal_can

STACK_SIGNAL = signal.SIGUSR1
# The other side waits a little longer than this before it kills.
CLOSE_S = 1.0


class Worker:
    """Answers calls for as long as the other side is there."""

    def __init__(self, environment: Any, config: EnvConfig, writer: asyncio.StreamWriter, marks: Marks) -> None:
        self.environment = environment
        self.config = config
        self.writer = writer
        self.marks = marks
        self._running: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Future[Payload]] = {}
        self._numbers = itertools.count(1)
        self._costs: dict[str, float] = {}

    async def serve(self, reader: asyncio.StreamReader, *, with_tasks: bool) -> None:
        """Set up, say so, and answer until the other side is gone."""
        answer = await prepare(self.environment, self.config, with_tasks=with_tasks)
        self._send(answer)
        if "ready" not in answer:
            return
        self.tasks: dict[str, Sequence[Task]] = {
            "train": self.environment.train_tasks,
            "eval": self.environment.eval_tasks,
        }
        calls = Calls(score_limit(self.config), self.marks)
        async for payload in messages(reader):
            self._take(calls, payload)
            with suppress(ConnectionError):  # the reader tells
                await self.writer.drain()
        try:
            await asyncio.wait_for(_call_hook(self.environment, "close"), CLOSE_S)
        except BaseException as error:  # only the log is there to be told
            with suppress(OSError):
                say(f"env.id = {self.config.id!r}: close failed: {failure_of(error)}", error=True)

    def _send(self, message: Payload) -> None:
        self.writer.write(frame(message))

    def _take(self, calls: Calls, payload: Payload) -> None:
        if "answer" in payload:
            asked = self._asked.pop(payload["answer"], None)
            if asked is not None and not asked.done():
                asked.set_result(payload)
        elif "cancel" in payload:
            if (running := self._running.get(payload["cancel"])) is not None:
                running.cancel()
        else:
            number = payload["call"]
            answer = self._play if payload["method"] == "rollout" else self._answer
            task = self._running[number] = asyncio.ensure_future(answer(calls, payload))
            task.add_done_callback(lambda ended: self._forget(number, ended))

    def _forget(self, number: int, ended: asyncio.Task[None]) -> None:
        del self._running[number]
        if ended.cancelled():  # before it began; every call is answered
            self._send({"call": number} | failed(Failure(CALLED_OFF), lingers=False))

    async def _answer(self, calls: Calls, payload: Payload) -> None:
        number = payload["call"]
        function: Callable[..., Any] = getattr(self.environment, payload["method"])
        arguments = [self._task(payload), *payload["arguments"]]
        outcome = await calls.run(number, function, arguments)
        self._send_reply(number, reply(function, outcome, checked_score))

    async def _play(self, calls: Calls, payload: Payload) -> None:
        number, function = payload["call"], self.environment.rollout
        clock = Clock(turn_limit(self.config), episode_limit(self.config))
        model = RemoteModel(partial(self._ask, number), clock)
        outcome = await calls.play(number, _begun(function, self._task(payload), model), clock)
        self._send_reply(number, reply(function, outcome, lambda value: asdict(checked_result(value))))

    def _send_reply(self, number: int, answer: Payload) -> None:
        """With what rewards have cost so far, where that has changed."""
        costs = getattr(self.environment, "reward_costs", dict)()  # of envs/rewarded.py
        if costs != self._costs:
            self._costs, answer = costs, answer | {"costs": costs}
        self._send({"call": number} | answer)

    async def _ask(self, call: int, request: Payload) -> Payload:
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"ask": number, "call": call} | request)
            return await asked
        finally:
            self._asked.pop(number, None)

    def _task(self, payload: Payload) -> Task:
        """With messages of the call's own: an episode may append to them while others play the same task."""
        split, position = payload["task"]
        task = self.tasks[split][position]
        return replace(task, messages=copy.deepcopy(task.messages))


def reply(function: Callable[..., Any], outcome: Outcome, check: Callable[[Any], Any]) -> Payload:
    """The outcome of a call as it is sent. What is not a reward is a failure."""
    failure = outcome.failure
    if failure is None:
        try:
            return {"value": check(outcome.value)}
        except BadReward as error:
            failure = Failure(str(error), place_of(function))
        except Exception as error:  # of objects that users made: every call is answered
            failure = failure_of(error)
    return failed(failure, lingers=outcome.lingers)


def failed(failure: Failure, *, lingers: bool) -> Payload:
    return {"failure": asdict(failure), "lingers": lingers}


def make(config: EnvConfig) -> tuple[Any, Payload]:
    """The environment, or the answer that says why there is none."""
    try:
        return make_environment(config), {}
    except UserError as error:
        return None, {"refused": str(error)}
    except BaseException as error:
        return None, refusal(config, error)


async def prepare(environment: Any, config: EnvConfig, *, with_tasks: bool) -> Payload:
    """Set the environment up; the answer tells of its tasks, or why there are none."""
    try:
        if not has(environment, "score") and not has(environment, "rollout"):
            raise UserError(f"env.id = {config.id!r} has neither `score` nor `rollout`; {EXAMPLES}")
        await _call_hook(environment, "setup")
        tasks = describe_tasks(environment, config)
        return {
            "ready": {
                "fingerprint": fingerprint(tasks),
                "tasks": tasks if with_tasks else None,
                "is_interactive": has(environment, "rollout"),
                "tools": tool_schemas(environment, config) or None,
            }
        }
    except UserError as error:
        return {"refused": str(error)}
    except BaseException as error:
        return refusal(config, error)


def tool_schemas(environment: Any, config: EnvConfig) -> list[Payload]:
    """Of the tools that an environment names; UserError where one cannot be told to a model."""
    tools = environment.tools if has(environment, "tools") else ()
    if not isinstance(tools, list | tuple):
        raise UserError(f"env.id = {config.id!r}: tools is {shown(tools)}; make it a tuple or a list of functions")
    schemas = []
    for place, tool in enumerate(tools):
        if not callable(tool) and not isinstance(tool, dict):
            raise UserError(f"env.id = {config.id!r}: tools[{place}] is {shown(tool)}, neither a function nor a schema")
        try:
            schemas.append(as_schema(tool))
        except Exception as error:  # of types that cannot be described, or named: pydantic has many
            reason = shorten(" ".join(f"{type(error).__name__}: {error}".split()), 400)
            raise UserError(
                f"env.id = {config.id!r}: tools[{place}], {shown(tool)}, cannot be described to a model: {reason}"
            ) from error
    return schemas


def refusal(config: EnvConfig, error: BaseException) -> Payload:
    failure = failure_of(error)
    return {"refused": f"env.id = {config.id!r} cannot be created: {failure}\n{failure.frames}".rstrip()}


async def _begun(function: Callable[..., Any], task: Task, model: RemoteModel) -> Any:
    """Called within the episode, so what the call itself raises belongs to it."""
    return await function(task, model)


async def _call_hook(environment: Any, name: str) -> None:
    hook = getattr(environment, name, None)
    if hook is not None and inspect.isawaitable(waiting := hook()):
        await waiting


def main() -> None:
    write_what_the_terminal_can(PrintableStream)
    make_errors_printable()
    connection, mark, stacks = map(int, sys.argv[1:])
    # They reach every process of a run; the orchestrator decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which children of users' code would inherit
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    marks = Marks(mark)
    with asyncio.Runner(loop_factory=lambda: FairLoop(marks.turn)) as runner:
        reader, writer = runner.run(_connect(connection))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            request = runner.run(receive(reader))
            sys.path[:] = request["path"]
            setup_logging("info", "tandem")  # what a judge costs, servers and scorers that fail
            config = EnvConfig.model_validate(request["env"])
            environment, answer = make(config)  # outside the event loop: it may run one itself
            if environment is None:
                writer.write(frame(answer))
            else:
                worker = Worker(environment, config, writer, marks)
                runner.run(worker.serve(reader, with_tasks=request["with_tasks"]))
            runner.run(_close(writer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that users' code left behind do not hold this up


async def _connect(connection: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(sock=socket.socket(fileno=connection))


async def _close(writer: asyncio.StreamWriter) -> None:
    """When all is sent."""
    writer.close()
    await writer.wait_closed()


if __name__ == "__main__":
    main()
