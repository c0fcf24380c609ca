"""Messages between a worker process and its owner: JSON behind eight bytes of length.

Models and users write numbers beyond 64 bits and halves of surrogate pairs. orjson has neither, so Python's json writes
such a message; the space in front of it tells the reader, since orjson would round the numbers.
"""

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import orjson

LENGTH = struct.Struct("!Q")
AT_ONCE = 8  # messages that a pass of the event loop takes; thousands may have come, and others wait for it too

Payload = dict[str, Any]

Ask = Callable[[Payload], Awaitable[Payload]]
"""Sends a question of a call to the owner of its process, and gives the answer."""


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


async def messages(reader: asyncio.StreamReader) -> AsyncIterator[Payload]:
    """All that the other side sends, until it is gone."""
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            for _ in range(AT_ONCE):
                yield await receive(reader)
            await asyncio.sleep(0)
