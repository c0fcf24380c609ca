"""Rewards that compute for long, in processes of their own: each call within its time limit, whatever its code does.

    score ─► a free worker ─► rewards/pool_worker.py ─► a number, or what went wrong
                │ over its time, or gone
                ▼
             the call fails; the worker is killed with all it started, and another takes its place

Called by rewards/weighted.py, in the environment's process.
"""

import asyncio
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tandem.config.rewards import RewardConfig
from tandem.utils.places import FailedElsewhere
from tandem.utils.processes import describe_exit, kept, kill_tree

STARTUP_S = 120.0
LINE_BYTES = 1 << 20
EXIT_S = 2.0
EXIT_POLL_S = 0.01


class RewardFailed(FailedElsewhere):
    """A reward function raised, took too long, or ended its process."""


class RewardPool:
    """`score(2, …)` is the third of the `rewards`. For one event loop."""

    def __init__(self, rewards: Sequence[RewardConfig], size: int) -> None:
        self.rewards = rewards
        self._idle: list[_Worker] = []
        self._slots = asyncio.Semaphore(size)

    async def score(self, number: int, arguments: Mapping[str, Any]) -> float:
        """The reward. Waiting for a worker, and its start, do not count as the reward's time."""
        config = self.rewards[number]
        async with self._slots:
            worker = self._idle.pop() if self._idle else await _Worker.start(self.rewards)
            try:
                async with asyncio.timeout(config.timeout_s):
                    answer = await worker.call({"reward": number, "arguments": arguments})
            except TimeoutError:
                worker.kill()
                raise RewardFailed(f"{config.label} took longer than timeout_s = {config.timeout_s:g} s") from None
            except (EOFError, ConnectionError):
                raise RewardFailed(f"{config.label} ended its process with {await worker.end()}") from None
            except BaseException:  # cancelled, or arguments that are no JSON
                worker.kill()
                raise
            self._idle.append(worker)
        if "error" in answer:
            raise RewardFailed(f"{config.label}: {answer['error']}", answer["where"])
        return answer["value"]

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().kill()


class _Worker:
    """One process, and the connection to it: a line of JSON each way for every call."""

    def __init__(self, process: subprocess.Popen[bytes], streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]):
        self.process = process
        self.reader, self.writer = streams

    @classmethod
    async def start(cls, rewards: Sequence[RewardConfig]) -> "_Worker":
        ours, theirs = socket.socketpair()
        with theirs:
            command = kept([sys.executable, "-m", "tandem.rewards.pool_worker", str(theirs.fileno())])
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        worker = cls(process, await asyncio.open_connection(sock=ours, limit=LINE_BYTES))
        described = {"rewards": [config.model_dump(mode="json") for config in rewards], "path": sys.path}
        try:
            async with asyncio.timeout(STARTUP_S):
                await worker.call(described)
        except (EOFError, ConnectionError, TimeoutError) as error:
            raise RewardFailed(f"the process for rewards did not start: {await worker.end()}") from error
        except BaseException:
            worker.kill()
            raise
        return worker

    async def call(self, request: dict[str, Any]) -> dict[str, Any]:
        self.writer.write(orjson.dumps(request, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
        await self.writer.drain()
        answer = await self.reader.readline()
        if not answer.endswith(b"\n"):
            raise EOFError
        return orjson.loads(answer)

    async def end(self) -> str:
        """How the process ended, by itself or by us."""
        self.writer.close()
        try:
            async with asyncio.timeout(EXIT_S):
                while (code := self.process.poll()) is None:
                    await asyncio.sleep(EXIT_POLL_S)
        except TimeoutError:
            self.kill()
            return "nothing, and was killed"
        return describe_exit(code)

    def kill(self) -> None:
        self.writer.close()
        kill_tree(self.process)
