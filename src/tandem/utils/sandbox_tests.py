"""Tests of a program in the sandbox, in the same interpreter: what they say is believed only where they can fail.

    process in the sandbox                         here
    the program has ended         ──────────►      sends the tests, which were nowhere in the sandbox before
    runs them: passed, or failed  ──────────►      where they passed, sends one that raises a random text
    runs it: failed, with what    ──────────►      passed, if that is the text

So a program does not pass by leaving early, by writing to every descriptor, or by disabling what makes tests fail. One
that knows all this, and lies about the tests alone, shares the interpreter with them and cannot be stopped.
"""

import asyncio
import secrets
import socket
from contextlib import suppress

from tandem.utils.sandbox_child import LENGTH_BYTES

PASSED = b"\n"


async def passes(connection: socket.socket, tests: str | None) -> bool:
    """Whether the program at the other end of `connection` has ended and passes `tests`, where there are any."""
    if tests is None:
        return False
    reader, writer = await asyncio.open_connection(sock=connection)

    async def answer_to(source: str) -> bytes:
        content = source.encode(errors="surrogatepass")
        writer.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)
        return await reader.readline()

    text = secrets.token_hex(16)
    try:
        with suppress(ConnectionError, ValueError):  # it ended, or wrote a line without an end
            if await reader.readline() == PASSED and await answer_to(tests) == PASSED:
                return await answer_to(f"raise AssertionError({text!r})") == f"AssertionError: {text}\n".encode()
        return False
    finally:
        writer.close()
