"""What runs on a node of a Ray cluster for `Cluster`: one process a worker, with the work function in a thread of it.

Messages are JSON. The work function is named, not sent: the node imports it from its own files. (What Ray itself does
with its connections is in docs/python.md.)
"""

import asyncio
import os
import queue
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from tandem.utils.errors import shorten_lines
from tandem.utils.imports import load_object
from tandem.utils.ports import listen


class TooLarge(ValueError):
    """A message is larger than whoever receives it allows."""


class Closed(Exception):
    """Whoever started this worker has ended it."""


def decode(message: bytes, max_size: int | None) -> Any:
    if max_size is not None and len(message) > max_size:
        raise TooLarge(f"a message of {len(message)} bytes is larger than max_size = {max_size}")
    return orjson.loads(message)


class Handle:
    """The work function's end: `recv` and `send`. Both are for what JSON can hold."""

    def __init__(self, host: "Host", loop: asyncio.AbstractEventLoop) -> None:
        self._host = host
        self._loop = loop
        self._inbox: queue.Queue[bytes | None] = queue.Queue()

    def recv(self, max_size: int | None = None) -> Any:
        """The next message, however long it takes. Raises Closed when the cluster is stopped."""
        message = self._inbox.get()
        if message is None:
            raise Closed
        return decode(message, max_size)

    def send(self, message: Any) -> None:
        asyncio.run_coroutine_threadsafe(self._host.publish(orjson.dumps(message)), self._loop).result()


class Host:
    """A Ray actor. Its methods are called by `tandem.launch.ray.cluster` only."""

    def __init__(self) -> None:
        self._outbox: deque[bytes] = deque()
        self._changed = asyncio.Condition()
        self._end: str | None = None  # why the work function has ended
        self._handle: Handle | None = None

    async def where(self) -> tuple[str, int]:
        """The address by which other nodes reach this one, and a port that is free on it."""
        import ray  # pyright: ignore[reportMissingImports]

        address = ray.util.get_node_ip_address()
        with listen(address, 0) as listening:
            return address, listening.getsockname()[1]

    async def begin(self, work_fn: str, environment: Mapping[str, str], path: Sequence[str]) -> None:
        """Import the work function and start it; whatever keeps it from being imported is raised."""
        os.environ.update(environment)
        sys.path += [folder for folder in path if folder not in sys.path]
        function = load_object(work_fn, "work_fn")
        self._handle = Handle(self, asyncio.get_running_loop())
        rank, world_size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        arguments = (function, self._handle, rank, world_size, asyncio.get_running_loop())
        threading.Thread(target=self._work, args=arguments, name="work", daemon=True).start()

    async def put(self, message: bytes) -> None:
        assert self._handle is not None
        self._handle._inbox.put(message)

    async def get(self) -> tuple[bytes | None, str | None]:
        """The next message of the work function; or why there will be no more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._outbox or self._end is not None)
            return (self._outbox.popleft(), None) if self._outbox else (None, self._end)

    async def close(self) -> None:
        """Returns when the work function has ended."""
        if self._handle is not None:
            self._handle._inbox.put(None)
            async with self._changed:
                await self._changed.wait_for(lambda: self._end is not None)

    async def publish(self, message: bytes) -> None:
        async with self._changed:
            self._outbox.append(message)
            self._changed.notify_all()

    def _work(self, function: Any, handle: Handle, rank: int, world_size: int, loop: asyncio.AbstractEventLoop) -> None:
        try:
            function(handle, rank, world_size)
            reason = "its work function has returned"
        except Closed:
            reason = "it was stopped"
        except BaseException:  # answers: those who wait have to learn of it, whatever it was
            reason = f"its work function failed on {socket.gethostname()}:\n{shorten_lines(traceback.format_exc())}"
        asyncio.run_coroutine_threadsafe(self._finish(reason), loop).result()

    async def _finish(self, reason: str) -> None:
        async with self._changed:
            self._end = reason
            self._changed.notify_all()
