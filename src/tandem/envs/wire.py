"""Messages between the orchestrator and the process of an environment: JSON behind eight bytes of length.

Models and users write numbers beyond 64 bits and halves of surrogate pairs. orjson has neither, so Python's json writes
such a message; the space in front of it tells the reader, since orjson would round the numbers.
"""

import asyncio
import contextlib
import json
import socket
import struct
from typing import Any

import orjson

LENGTH = struct.Struct("!Q")

Payload = dict[str, Any]


def frame(message: Payload) -> bytes:
    try:
        content = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        content = b" " + json.dumps(message).encode()
    return LENGTH.pack(len(content)) + content


def parse(content: bytes) -> Payload:
    return json.loads(content) if content.startswith(b" ") else orjson.loads(content)


async def receive(reader: asyncio.StreamReader) -> Payload:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return parse(await reader.readexactly(length))


class Channel:
    """The blocking end. One thread may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")

    def send(self, message: Payload) -> None:
        """Nothing is sent where the other side is gone: `receive` tells that."""
        with contextlib.suppress(ConnectionError):
            self._connection.sendall(frame(message))

    def receive(self) -> Payload | None:
        """The next message; None when the other side is gone, whether it had read all that was sent or not."""
        try:
            header = self._file.read(LENGTH.size)
            if len(header) < LENGTH.size:
                return None
            (length,) = LENGTH.unpack(header)
            content = self._file.read(length)
        except ConnectionError:
            return None
        return parse(content) if len(content) == length else None
