"""An environment in a process of its own: users' code can hang, crash or exit, and costs a rollout, not the run.

score, play ──► the current process (envs/worker_process.py) ──► reward
                    │ lost
                    ▼
the call that is to blame fails; all others run again in a new process, suspects first (envs/suspects.py)
"""

import asyncio
import logging
<<<<<<< HEAD
import os
import socket
import subprocess
import sys
import tempfile
import time
=======
>>>>>>> h4
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeGuard

from tandem.config.environment import EnvConfig
from tandem.envs.failures import Failure, UserCodeError
from tandem.envs.protocol import Player, Score
from tandem.envs.results import Result
from tandem.envs.suspects import Suspects
from tandem.envs.wire import Payload
from tandem.envs.worker_process import WorkerLost, WorkerProcess
from tandem.types.rollout import Task
<<<<<<< HEAD
from tandem.utils.errors import UserError, shorten
from tandem.utils.processes import describe_exit, kill_tree
from tandem.utils.waiting import Deadline
=======
from tandem.utils.errors import UserError
>>>>>>> h4

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldTask(Task):
    """A task that lies in the environment's process, and where."""

    split: str = ""
    position: int = -1
    is_interactive: bool = False  # it is played, not scored
    tools: list[dict[str, Any]] | None = None  # that the model is given


def is_played(task: Task) -> TypeGuard[HeldTask]:
    return isinstance(task, HeldTask) and task.is_interactive


<<<<<<< HEAD
@dataclass
class Call:
    answer: asyncio.Future[Any]
    limit_s: float
    over_limit: str  # what is said of it past the limit
    player: Player | None = None  # of an episode
    started: float | None = None  # when its code began to run; None: it waits for its turn, or for the model
    asked: set[asyncio.Task[None]] = field(default_factory=set)  # turns of the model that it waits for

    def end_turns(self) -> None:
        for turn in self.asked:
            turn.cancel()

    def is_over(self, now: float) -> bool:
        return self.started is not None and now - self.started > self.limit_s + GRACE_S


class Worker:
    """One process. `start` returns when the environment is made."""

    def __init__(self, config: EnvConfig) -> None:
        self.config = config
        self.is_lost = False
        self.costs: dict[str, float] = {}  # of its rewards, so far
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._background: list[asyncio.Task[None]] = []
        self._writer: asyncio.StreamWriter | None = None
        self._unsent: list[bytes] = []
        # What can be read of the process while its Python is stuck: whose code runs, and where its threads are.
        self._mark: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._mark.write(bytes(MARK_BYTES))
        self._mark.flush()
        self._stacks: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._ours, theirs = socket.socketpair()
        with theirs:
            descriptors = [theirs.fileno(), self._mark.fileno(), self._stacks.fileno()]
            arguments = map(str, [os.getpid(), *descriptors])
            command = [sys.executable, "-m", "tandem.envs.worker", *arguments]
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=descriptors)

    async def start(self, *, with_tasks: bool) -> Payload:
        """Make the environment; UserError where that fails. Returns its tasks, or their fingerprint alone."""
        reader, self._writer = await asyncio.open_connection(sock=self._ours)
        request = {"env": self.config.model_dump(mode="json"), "path": sys.path, "with_tasks": with_tasks}
        self._writer.write(frame(request))
        answer = await self._first_answer(reader)
        self._background = [asyncio.ensure_future(self._read(reader)), asyncio.ensure_future(self._watch())]
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
            raise UserError(f"{error}\n{await self._read_stacks()}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            how = describe_exit(await self._exit_code())
            raise UserError(f"env.id = {self.config.id!r} cannot be created: its process ended with {how}") from None
        finally:
            reading.cancel()
        if "refused" in answer:
            raise UserError(answer["refused"])
        return answer

    async def score(self, request: Payload) -> Any:
        limit_s = self.config.score_timeout_s
        _, call = self._call({"method": "score"} | request, limit_s, over_limit(limit_s))
        return await call.answer

    async def play(self, request: Payload, player: Player) -> Payload:
        limit_s = self.config.turn_timeout_s
        request = {"method": "rollout", "arguments": []} | request
        number, call = self._call(request, limit_s, over_turn(limit_s), player)
        try:
            return await call.answer
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            call.end_turns()

    def _call(self, request: Payload, limit_s: float, over: str, player: Player | None = None) -> tuple[int, Call]:
        number = next(self._numbers)
        # It stays there until it is answered, also if no caller waits any more: its code may still hang.
        call = self._calls[number] = Call(asyncio.get_running_loop().create_future(), limit_s, over, player)
        self._send({"call": number} | request)
        return number, call

    def _send(self, message: Payload) -> None:
        """With all that is sent in this pass of the event loop."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(frame(message))

    def _flush(self) -> None:
        assert self._writer is not None, "not started"
        if not self.is_lost:
            self._writer.write(b"".join(self._unsent))
        self._unsent.clear()

    async def close(self) -> None:
        """Let it end; what does not end at once is killed."""
        self.is_lost = True
        for task in self._background:
            task.cancel()
        (self._writer or self._ours).close()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._exit_code(), CLOSE_S)
        kill_tree(self.process)
        self._mark.close()
        self._stacks.close()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                for _ in range(AT_ONCE):
                    self._take(await receive(reader))
                await asyncio.sleep(0)

    def _take(self, answer: Payload) -> None:
        if "started" in answer:
            if call := self._calls.get(answer["started"]):
                call.started = time.monotonic()
            return
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
            self._lose(set(), Failure(""))

    async def _take_turn(self, call: Call, asked: Payload) -> None:
        """The model's turn. The clock of the environment's code stands still meanwhile."""
        assert call.player is not None, "only episodes ask"
        call.started = None
        try:
            self._send({"answer": asked["ask"]} | await _turn_of(call.player, asked))
        except Exception as error:  # the server's fault, not the environment's: the episode ends with it
            if not call.answer.done():
                call.answer.set_exception(error)
            self._send({"cancel": asked["call"]})
            return
        if len(call.asked) == 1:
            call.started = time.monotonic()

    async def _watch(self) -> None:
        """Notice that the process has ended, or end it where a call is over its limit and nothing inside helps."""
        while not self.is_lost:
            await asyncio.sleep(WATCH_S)
            running, now = self._running(), time.monotonic()
            over = {number: call for number, call in self._calls.items() if call.is_over(now)}
            if (code := self.process.poll()) is not None:
                started = {number for number, call in self._calls.items() if call.started is not None}
                failure = Failure(f"the environment's process ended with {describe_exit(code)}")
                self._lose({running} if running else started, failure)
            elif over and (running is None or running in over):  # else one that still has time keeps the event loop
                stacks = await self._read_stacks()
                culprits = {running: over[running]} if running else over
                reason = next(iter(culprits.values())).over_limit
                self._lose(set(culprits), Failure(reason, place_in(stacks), stacks, hung=True))

    def _lose(self, culprits: set[int], failure: Failure) -> None:
        self.is_lost = True
        kill_tree(self.process)
        for number, call in self._calls.items():
            if not call.answer.done():
                call.answer.set_exception(UserCodeError(failure) if number in culprits else WorkerLost())
        self._calls.clear()

    def _running(self) -> int | None:
        """The call whose code keeps the event loop now, if it is one."""
        number = int.from_bytes(os.pread(self._mark.fileno(), MARK_BYTES, 0), "big")
        return number if number in self._calls else None

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
        text = os.pread(self._stacks.fileno(), written, 0).decode(errors="replace")
        return shorten(text, MAX_TRACEBACK)

    async def _exit_code(self) -> int:
        while (code := self.process.poll()) is None:
            await asyncio.sleep(0.01)
        return code


=======
>>>>>>> h4
class EnvironmentProcess:
    """The environment as the orchestrator sees it."""

    def __init__(self, config: EnvConfig, worker: WorkerProcess, ready: Payload, name: str) -> None:
        self.config = config
        self.train_tasks = _held_tasks("train", ready, name)
        self.eval_tasks = _held_tasks("eval", ready, name)
        self._fingerprint = ready["fingerprint"]
        self._worker = worker
        self._replacing: asyncio.Task[None] | None = None
        self._suspects = Suspects()
        self._past_costs: Counter[str] = Counter()  # of processes that ended

    @property
    def costs(self) -> dict[str, float]:
        """What rewards have cost since the start, by name."""
        costs = self._past_costs.copy()
        costs.update(self._worker.costs)
        return dict(costs)

    async def score(self, task: Task, completion: str) -> Score:
        request = _request(task) | {"arguments": [completion]}
        return await self._until_answered(lambda worker: worker.score(request))

    async def play(self, task: Task, player: Player) -> Result:
        def play(worker: WorkerProcess) -> Awaitable[Payload]:
            player.restart()
            return worker.play(_request(task), player)

        return Result(**await self._until_answered(play))

    async def _until_answered(self, call: Callable[[WorkerProcess], Awaitable[Any]]) -> Any:
        is_suspect = False
        while True:
            try:
                if is_suspect:
                    async with self._suspects.turn():
                        return await call(await self._live_worker())
                worker = await self._live_worker()
                if self._suspects.are_clear:
                    return await call(worker)
                await self._suspects.wait_until_clear()
            except WorkerLost as lost:
                is_suspect = lost.num_suspects > 0
                if is_suspect:
                    self._suspects.add(lost.num_suspects)

    async def close(self) -> None:
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.wait([self._replacing])
        await self._worker.close()

    async def _live_worker(self) -> WorkerProcess:
        """Another one, if this one is lost. Whoever asks first starts it, and it starts whether or not they go on
        waiting."""
        while self._worker.is_lost:
            if self._replacing is None or self._replacing.done():
                self._replacing = asyncio.ensure_future(self._replace())
            try:
                await asyncio.shield(self._replacing)
            except UserError as error:
                raise UserCodeError(Failure(f"the environment cannot be created again: {error}")) from None
        return self._worker

    async def _replace(self) -> None:
        logger.warning("restarting the environment's process")
        await self._worker.close()
        if self._worker.has_culprit:
            self._suspects.acquit()
        self._past_costs.update(self._worker.costs)
        self._worker.costs = {}
        worker = WorkerProcess(self.config)
        try:
            ready = await worker.start(with_tasks=False)
            if ready["fingerprint"] != self._fingerprint:
                raise UserError("its tasks changed; creating it twice must give the same tasks")
        except BaseException:
            await worker.close()
            raise
        self._worker = worker


@asynccontextmanager
async def open_environment(config: EnvConfig, name: str = "") -> AsyncIterator[EnvironmentProcess]:
    """The environment that `config` names, ended with the block; UserError if it cannot be made. Its tasks have its
    name in a mixture."""
    worker = WorkerProcess(config)
    environment = None
    try:
        environment = EnvironmentProcess(config, worker, await worker.start(with_tasks=True), name)
        yield environment
    finally:
        await (environment or worker).close()


def _held_tasks(split: str, ready: Payload, name: str) -> list[HeldTask]:
    shared = {"split": split, "environment": name, "is_interactive": ready["is_interactive"], "tools": ready["tools"]}
    return [
        HeldTask(**described, **shared, position=position) for position, described in enumerate(ready["tasks"][split])
    ]


def _request(task: Task) -> Payload:
    assert isinstance(task, HeldTask), "a task of another environment"
    return {"task": [task.split, task.position]}
<<<<<<< HEAD


async def _turn_of(player: Player, asked: Payload) -> Payload:
    try:
        return await player.chat(asked["messages"], asked["tools"], asked["max_tokens"])
    except ContextFull as error:
        return {"context_full": str(error)}
    except ChatRefused as error:
        return {"refused": str(error)}
=======
>>>>>>> h4
