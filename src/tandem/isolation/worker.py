"""The inside of a worker process: `python -m tandem.isolation.worker`, started and ended by process.py.

Whatever users' code does here, hang, crash, exit, print, it does to this process, and its owner goes on with another.

    reads    {"service": "module:name", "setup": …, "path": …}    once: what answers the calls
             {"call": 7, …}                    the rest is the service's
             {"answer": 1, …}                  to what a call has asked
             {"cancel": 8}
    writes   {"ready": …} | {"refused": …}     once
             {"call": 7, "value": …} | {"call": 7, "failure": …, "lingers": …}, with "costs" where they changed
             {"ask": 1, "call": 8, …}          while call 8 runs

Nothing here waits for the other side to read: the event loop belongs to users' code. Where answers pile up, no further
calls are taken.
"""

import asyncio
import faulthandler
import importlib
import itertools
import os
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from tandem.isolation.calls import CALLED_OFF, Calls, Outcome
from tandem.isolation.clock import FairLoop
from tandem.isolation.failures import Failure, failure_of
from tandem.isolation.marks import STACK_SIGNAL, Marks
from tandem.isolation.wire import Ask, Payload, frame, messages, receive
from tandem.utils.errors import UserError
from tandem.utils.log import PrintableStream, make_errors_printable, say, write_what_the_terminal_can

# The other side waits a little longer than this before it kills.
CLOSE_S = 1.0


class Service(Protocol):
    """What a worker process is for. Made of its setup, outside the event loop, which users' code may run itself."""

    name: str
    """As an error names it."""

    @property
    def costs(self) -> dict[str, float]:
        """What its calls have cost so far, by name."""
        ...

    async def start(self) -> Payload:
        """What the owner gets to know; UserError where it cannot be had."""
        ...

    async def answer(self, calls: Calls, number: int, request: Payload, ask: Ask) -> Outcome:
        """What comes of a request: a value that can be sent, or a failure."""
        ...

    async def close(self) -> None: ...


class Worker:
    """Answers calls for as long as the other side is there."""

    def __init__(self, service: Service, writer: asyncio.StreamWriter, marks: Marks) -> None:
        self.service = service
        self.writer = writer
        self.marks = marks
        self._running: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Future[Payload]] = {}
        self._numbers = itertools.count(1)
        self._costs: dict[str, float] = {}

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Start, say so, and answer until the other side is gone."""
        try:
            self._send({"ready": await self.service.start()})
        except UserError as error:
            self._send({"refused": str(error)})
            return
        calls = Calls(self.marks)
        async for payload in messages(reader):
            self._take(calls, payload)
            with suppress(ConnectionError):  # the reader tells
                await self.writer.drain()
        try:
            await asyncio.wait_for(self.service.close(), CLOSE_S)
        except BaseException as error:  # cleans up: only the log is there to be told
            with suppress(OSError):
                say(f"{self.service.name}: close failed: {failure_of(error)}", error=True)

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
            task = self._running[number] = asyncio.ensure_future(self._answer(calls, number, payload))
            task.add_done_callback(lambda ended: self._forget(number, ended))

    def _forget(self, number: int, ended: asyncio.Task[None]) -> None:
        del self._running[number]
        if ended.cancelled():  # before it began; every call is answered
            self._reply(number, Outcome(failure=Failure(CALLED_OFF)))

    async def _answer(self, calls: Calls, number: int, payload: Payload) -> None:
        self._reply(number, await self.service.answer(calls, number, payload, partial(self._ask, number)))

    def _reply(self, number: int, outcome: Outcome) -> None:
        """With what calls have cost so far, where that has changed."""
        if outcome.failure is None:
            answer = {"call": number, "value": outcome.value}
        else:
            answer = {"call": number, "failure": asdict(outcome.failure), "lingers": outcome.lingers}
        if (costs := self.service.costs) != self._costs:
            self._costs, answer = costs, answer | {"costs": costs}
        self._send(answer)

    async def _ask(self, call: int, request: Payload) -> Payload:
        number = next(self._numbers)
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"ask": number, "call": call} | request)
            return await asked
        finally:
            self._asked.pop(number, None)


def main() -> None:
    write_what_the_terminal_can(PrintableStream)
    make_errors_printable()
    connection, mark, stacks = map(int, sys.argv[1:])
    # They reach every process of a run; the owner decides.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which children of users' code would inherit
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)
    marks = Marks(mark)
    with asyncio.Runner(loop_factory=lambda: FairLoop(marks.turn)) as runner:
        reader, writer = runner.run(_connect(connection))
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            request = runner.run(receive(reader))
            sys.path[:] = request["path"]
            try:
                service = _load(request["service"])(request["setup"])
            except UserError as error:
                writer.write(frame({"refused": str(error)}))
            else:
                runner.run(Worker(service, writer, marks).serve(reader))
            runner.run(_close(writer))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads that users' code left behind do not hold this up


def _load(path: str) -> Callable[[Any], Service]:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


async def _connect(connection: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(sock=socket.socket(fileno=connection))


async def _close(writer: asyncio.StreamWriter) -> None:
    """When all is sent."""
    writer.close()
    await writer.wait_closed()


if __name__ == "__main__":
    main()
