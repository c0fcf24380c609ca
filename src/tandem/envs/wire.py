"""Messages between the orchestrator and the process of an environment: JSON behind eight bytes of length."""

import asyncio
import socket
import struct
from typing import Any

import orjson

LENGTH = struct.Struct("!Q")

Payload = dict[str, Any]


def frame(message: Payload) -> bytes:
    content = orjson.dumps(message, option=orjson.OPT_SERIALIZE_NUMPY)
    return LENGTH.pack(len(content)) + content


async def receive(reader: asyncio.StreamReader) -> Payload:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return orjson.loads(await reader.readexactly(length))


class Channel:
    """The blocking end. One thread may send while another receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._file = connection.makefile("rb")

    def send(self, message: Payload) -> None:
        self._connection.sendall(frame(message))

    def receive(self) -> Payload | None:
        """The next message; None when the other side is gone."""
        header = self._file.read(LENGTH.size)
        if len(header) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(header)
        content = self._file.read(length)
        return orjson.loads(content) if len(content) == length else None
