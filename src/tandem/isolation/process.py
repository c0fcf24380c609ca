"""One worker process, from start to end, as its owner sees it (worker.py is its inside).

    call ──► the process ──► value
                 │ its event loop stands still, or it is gone
                 ▼
    it is killed with all its children, and what it has said is read to the end. Of the calls that are still open, one
    whose code ran alone fails with what is known of it; where several ran, each is a suspect; the others are lost

Called by restarting.py, which runs lost calls and suspects again in the next process, and by pool.py.
"""

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import IO, Any

from tandem.isolation.clock import Limit
from tandem.isolation.failures import MAX_TRACEBACK, Failure, UserCodeError, place_in, stack_of
from tandem.isolation.marks import SIZE_BYTES, STACK_SIGNAL, Marks
from tandem.isolation.wire import AT_ONCE, Ask, Payload, frame, messages, receive
from tandem.utils.errors import UserError, shorten
from tandem.utils.processes import describe_exit, kept, kill_tree
from tandem.utils.waiting import Deadline

# The process ends calls at their limit itself; where its event loop has stood still for longer, it cannot.
GRACE_S = 3.0
GRACE_OF_ONE_S = 0.2  # where no other call would be lost with it
WATCH_S = 0.2
MAX_WATCH_S = 1.0  # counted between two looks: the rest is the orchestrator's own delay
CLOSE_S = 2.0


class WorkerLost(Exception):
    """The process was lost before it answered."""

    def __init__(self, num_suspects: int = 0) -> None:
        super().__init__()
        self.num_suspects = num_suspects  # of which this call is one; 0: it is none


@dataclass
class Call:
    answer: asyncio.Future[Any]
    limit: Limit
    ask: Ask | None  # what answers its questions
    asked: set[asyncio.Task[None]] = field(default_factory=set)  # answers that it waits for

    def end_answers(self) -> None:
        for answer in self.asked:
            answer.cancel()


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker process is for."""

    service: str  # "module:name" of a Service
    name: str  # of the process, in messages: "the environment's process"
    made: str  # what its start makes: "env.id = 'calculator'"
    startup_timeout_s: float
    startup_hint: str  # what to do about that
    is_shared: bool = True  # by several calls at a time


class WorkerProcess:
    """`start` returns when the service is made."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self.is_lost = False  # takes no calls any more
        self.exit = ""  # how it has ended, where it did by itself
        self.costs: dict[str, float] = {}  # of its calls, so far
        self.has_culprit = False  # its loss is the fault of one call
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._reading: asyncio.Task[None] | None = None
        self._background: list[asyncio.Task[None]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: asyncio.Queue[bytes] = asyncio.Queue()
        self._loss: Failure | None = None  # why it was lost; None: what is to blame has its answer
        # What can be read of the process while its Python is stuck: whose code runs, and where its threads are.
        with tempfile.TemporaryFile() as mark:
            mark.truncate(SIZE_BYTES)
            self._marks = Marks(mark.fileno())
            self._stacks: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
            self._ours, theirs = socket.socketpair()
            with theirs:
                descriptors = [theirs.fileno(), mark.fileno(), self._stacks.fileno()]
                command = kept([sys.executable, "-m", "tandem.isolation.worker", *map(str, descriptors)])
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)

    async def start(self, setup: Any) -> Any:
        """Make the service; UserError where that fails. Returns what it tells."""
        reader, self._writer = await asyncio.open_connection(sock=self._ours)
        self._writer.write(frame({"service": self.spec.service, "setup": setup, "path": sys.path}))
        answer = await self._first_answer(reader)
        # Of no call, where users' code has this one started (calls.py).
        start = Context().run
        self._reading = start(asyncio.ensure_future, self._read(reader))
        self._background = [
            start(asyncio.ensure_future, self._write(self._writer)),
            start(asyncio.ensure_future, self._watch()),
        ]
        return answer["ready"]

    async def _first_answer(self, reader: asyncio.StreamReader) -> Payload:
        deadline = Deadline(
            what=f"{self.spec.made} to be made",
            timeout_s=self.spec.startup_timeout_s,
            hint=self.spec.startup_hint,
        )
        reading = asyncio.ensure_future(receive(reader))
        try:
            while not reading.done():
                deadline.check()
                await asyncio.wait([reading], timeout=0.5)
            answer = reading.result()
        except TimeoutError as error:
            raise UserError(f"{error}\n{shorten(await self._read_stacks(), MAX_TRACEBACK)}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            how = await self._how_it_ended()
            raise UserError(f"{self.spec.made} cannot be created: its process {how}") from None
        finally:
            reading.cancel()
        if "refused" in answer:
            raise UserError(answer["refused"])
        return answer

    async def call(self, request: Payload, limit: Limit, ask: Ask | None = None) -> Any:
        """What the service answers; UserCodeError or WorkerLost where it does not. `limit` is for code that blocks the
        process: the service ends the rest itself. A call that can `ask` ends when it is cancelled."""
        assert not self.is_lost, "it would never be answered"
        number = next(self._numbers)
        # It stays there until it is answered, also if no caller waits any more: its code may still hang.
        call = self._calls[number] = Call(asyncio.get_running_loop().create_future(), limit, ask)
        self._send({"call": number} | request)
        try:
            return await call.answer
        except asyncio.CancelledError:
            if ask is not None:
                self._send({"cancel": number})
            raise
        finally:
            call.end_answers()

    def _send(self, message: Payload) -> None:
        self._unsent.put_nowait(frame(message))

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        """What is to be sent, no faster than the process takes it."""
        with suppress(ConnectionError):  # the reader tells
            while True:
                some = [await self._unsent.get()]
                while not self._unsent.empty() and len(some) < AT_ONCE:
                    some.append(self._unsent.get_nowait())
                writer.write(b"".join(some))
                await writer.drain()

    async def close(self) -> None:
        """Let it end; what does not end at once is killed."""
        if self.is_lost and self._reading is not None:
            await asyncio.wait([self._reading])  # callers get what it has said
        self.is_lost = True
        tasks = [*self._background, *filter(None, [self._reading])]
        for task in tasks:
            task.cancel()
        (self._writer or self._ours).close()
        await self._has_ended()
        kill_tree(self.process)
        self._marks.close()
        self._stacks.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async for message in messages(reader):
            self._take(message)
        if not self.is_lost:
            self.is_lost = True
            reason = f"{self.spec.name} {await self._how_it_ended()}"
            self._loss = Failure(reason, fault="memory" if self.process.poll() == -signal.SIGKILL else "crash")
            kill_tree(self.process)
        self._fail_open_calls()

    def _take(self, answer: Payload) -> None:
        if "ask" in answer:
            if call := self._calls.get(answer["call"]):
                answering = asyncio.ensure_future(self._answer(call, answer))
                call.asked.add(answering)
                answering.add_done_callback(call.asked.discard)
            return
        self.costs = answer.get("costs", self.costs)
        call = self._calls.pop(answer["call"])
        if not call.answer.done():
            if "failure" in answer:
                call.answer.set_exception(UserCodeError(Failure(**answer["failure"])))
            else:
                call.answer.set_result(answer["value"])
        if answer.get("lingers"):
            self._end(None)

    async def _answer(self, call: Call, asked: Payload) -> None:
        assert call.ask is not None, "it cannot ask"
        try:
            self._send({"answer": asked["ask"]} | await call.ask(asked))
        except Exception as error:  # answers: the fault of what was asked, not of users' code; the call ends with it
            if not call.answer.done():
                call.answer.set_exception(error)
            self._send({"cancel": asked["call"]})

    async def _watch(self) -> None:
        """Notice that the process has ended, or end it where its event loop stands still: nothing inside can."""
        turns, still_s, looked = self._marks.turns, 0.0, time.monotonic()
        while not self.is_lost:
            await asyncio.sleep(WATCH_S)
            before, looked = looked, time.monotonic()
            if self.process.poll() is not None:
                self._end_reading()
                return
            if not self._calls or self._marks.turns != turns:
                turns, still_s = self._marks.turns, 0.0
                continue
            still_s += min(looked - before, MAX_WATCH_S)
            call = next(iter(self._calls.values()))
            if still_s > call.limit.seconds + (GRACE_S if self.spec.is_shared else GRACE_OF_ONE_S):
                stacks = await self._read_stacks()
                if self._marks.turns == turns:
                    self._end(Failure(call.limit.reason, "", stacks, "time"))

    def kill(self) -> None:
        """With all that it has started."""
        self._end(None)

    def _end(self, loss: Failure | None) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._loss = loss
            kill_tree(self.process)
            self._end_reading()

    def _end_reading(self) -> None:
        """After what it has said: a child that it started may keep its end of the connection."""
        with suppress(OSError):
            self._ours.shutdown(socket.SHUT_RD)

    def _fail_open_calls(self) -> None:
        """Of calls without an answer, those whose code ran are suspects; where no code is marked, all of them."""
        running = {number: thread for number, thread in self._marks.running.items() if number in self._calls}
        suspects = set(running or self._calls) if self._loss else set()
        self.has_culprit = len(suspects) == 1
        for number, call in self._calls.items():
            if call.answer.done():
                continue
            if self._loss and suspects == {number}:
                call.answer.set_exception(UserCodeError(_at_thread(self._loss, running.get(number))))
            else:
                call.answer.set_exception(WorkerLost(len(suspects) if number in suspects else 0))
        self._calls.clear()

    async def _read_stacks(self) -> str:
        """Where each thread of the process is, from a signal handler that needs nothing of Python."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, STACK_SIGNAL)
        written, size = 0, -1
        for _ in range(20):
            await asyncio.sleep(0.05)
            size, written = written, os.fstat(self._stacks.fileno()).st_size
            if size == written > 0:
                break
        return os.pread(self._stacks.fileno(), written, 0).decode(errors="replace")

    async def _has_ended(self) -> bool:
        """Within a moment."""
        deadline = time.monotonic() + CLOSE_S
        while self.process.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        return self.process.poll() is not None

    async def _how_it_ended(self) -> str:
        if not await self._has_ended():
            return "closed its connection"
        self.exit = describe_exit(self.process.returncode)
        return f"ended with {self.exit}"


def _at_thread(loss: Failure, thread: int | None) -> Failure:
    """With the place where this thread was."""
    stack = loss.traceback if thread is None else stack_of(thread, loss.traceback)
    return replace(loss, where=place_in(stack), traceback=shorten(stack, MAX_TRACEBACK))
