"""One process of an environment, from start to end, as the orchestrator sees it (envs/worker.py is its inside).

    score, play ──► the process ──► reward
                        │ its event loop stands still, or it is gone
                        ▼
    it is killed with all its children, and what it has said is read to the end. Of the calls that are still open, one
    whose code ran alone fails with what is known of it; where several ran, each is a suspect; the others are lost

Called by envs/process.py, which runs lost calls and suspects again in the next process.
"""

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import IO, Any

from tandem.config.environment import EnvConfig
from tandem.envs.limits import score_limit, turn_limit
from tandem.envs.model import ChatRefused, ContextFull
from tandem.envs.protocol import Player
from tandem.envs.worker import STACK_SIGNAL
from tandem.isolation.clock import Limit
from tandem.isolation.failures import MAX_TRACEBACK, Failure, UserCodeError, place_in, stack_of
from tandem.isolation.marks import SIZE_BYTES, Marks
from tandem.isolation.wire import AT_ONCE, Payload, frame, messages, receive
from tandem.utils.errors import UserError, shorten
from tandem.utils.processes import describe_exit, kept, kill_tree
from tandem.utils.waiting import Deadline

# The process ends calls at their limit itself; where its event loop has stood still for longer, it cannot.
GRACE_S = 3.0
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
    player: Player | None = None  # of an episode
    asked: set[asyncio.Task[None]] = field(default_factory=set)  # turns of the model that it waits for

    def end_turns(self) -> None:
        for turn in self.asked:
            turn.cancel()


class WorkerProcess:
    """`start` returns when the environment is made."""

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self.is_lost = False  # takes no calls any more
        self.costs: dict[str, float] = {}  # of its rewards, so far
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
                command = kept([sys.executable, "-m", "tandem.envs.worker", *map(str, descriptors)])
                self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)

    async def start(self, *, with_tasks: bool) -> Payload:
        """Make the environment; UserError where that fails. Returns its tasks, or their fingerprint alone."""
        reader, self._writer = await asyncio.open_connection(sock=self._ours)
        request = {"env": self.config.model_dump(mode="json"), "path": sys.path, "with_tasks": with_tasks}
        self._writer.write(frame(request))
        answer = await self._first_answer(reader)
        self._reading = asyncio.ensure_future(self._read(reader))
        self._background = [asyncio.ensure_future(self._write(self._writer)), asyncio.ensure_future(self._watch())]
        return answer["ready"]

    async def _first_answer(self, reader: asyncio.StreamReader) -> Payload:
        deadline = Deadline(
            what=f"env.id = {self.config.id!r} to be made",
            timeout_s=self.config.startup_timeout_s,
            hint="env.startup_timeout_s allows no more",
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
            raise UserError(f"env.id = {self.config.id!r} cannot be created: its process {how}") from None
        finally:
            reading.cancel()
        if "refused" in answer:
            raise UserError(answer["refused"])
        return answer

    async def score(self, request: Payload) -> Any:
        _, call = self._call({"method": "score"} | request, score_limit(self.config))
        return await call.answer

    async def play(self, request: Payload, player: Player) -> Payload:
        request = {"method": "rollout", "arguments": []} | request
        number, call = self._call(request, turn_limit(self.config), player)
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            call.end_turns()

    def _call(self, request: Payload, limit: Limit, player: Player | None = None) -> tuple[int, Call]:
        assert not self.is_lost, "it would never be answered"
        number = next(self._numbers)
        # It stays there until it is answered, also if no caller waits any more: its code may still hang.
        call = self._calls[number] = Call(asyncio.get_running_loop().create_future(), limit, player)
        self._send({"call": number} | request)
        return number, call

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
        for task in [*self._background, *filter(None, [self._reading])]:
            task.cancel()
        (self._writer or self._ours).close()
        await self._has_ended()
        kill_tree(self.process)
        self._marks.close()
        self._stacks.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        async for message in messages(reader):
            self._take(message)
        if not self.is_lost:
            self.is_lost = True
            self._loss = Failure(f"the environment's process {await self._how_it_ended()}")
            kill_tree(self.process)
        self._fail_open_calls()

    def _take(self, answer: Payload) -> None:
        if "ask" in answer:
            if call := self._calls.get(answer["call"]):
                turn = asyncio.ensure_future(self._take_turn(call, answer))
                call.asked.add(turn)
                turn.add_done_callback(call.asked.discard)
            return
        self.costs = answer.get("costs", self.costs)
        call = self._calls.pop(answer["call"])
        if not call.answer.done():
            if "failure" in answer:
                call.answer.set_exception(UserCodeError(Failure(**answer["failure"])))
            else:
                call.answer.set_result(answer["value"])
        if answer.get("lingers"):
            self._kill(None)

    async def _take_turn(self, call: Call, asked: Payload) -> None:
        """The model's turn."""
        assert call.player is not None, "only episodes ask"
        try:
            self._send({"answer": asked["ask"]} | await _turn_of(call.player, asked))
        except Exception as error:  # the server's fault, not the environment's: the episode ends with it
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
            if still_s > call.limit.seconds + GRACE_S:
                stacks = await self._read_stacks()
                if self._marks.turns == turns:
                    self._kill(Failure(call.limit.reason, "", stacks, hung=True))

    def _kill(self, loss: Failure | None) -> None:
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
        return f"ended with {describe_exit(self.process.returncode)}"


def _at_thread(loss: Failure, thread: int | None) -> Failure:
    """With the place where this thread was."""
    stack = loss.traceback if thread is None else stack_of(thread, loss.traceback)
    return replace(loss, where=place_in(stack), traceback=shorten(stack, MAX_TRACEBACK))


async def _turn_of(player: Player, asked: Payload) -> Payload:
    try:
        return await player.chat(asked["messages"], asked["tools"], asked["max_tokens"])
    except ContextFull as error:
        return {"context_full": str(error)}
    except ChatRefused as error:
        return {"refused": str(error)}
