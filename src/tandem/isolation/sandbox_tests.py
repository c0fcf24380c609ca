"""Tests of a program in the sandbox, in the same interpreter: what they say is believed only where they can fail.

    process in the sandbox                         here
    reads a random key            ◄──────────      sends it
    runs the program
    the program has ended         ──────────►      sends the tests, which were nowhere in the sandbox before
    runs them: passed, or failed  ──────────►      where they passed, sends one that raises a random text
    runs it: failed, with what    ──────────►      passed, if that is the text

Every answer begins with the key, which the program finds on no frame while it runs. So it does not pass by leaving
early, by answering over its descriptors, or by disabling what makes tests fail. One that finds what runs the tests
(sandbox_judge.py) with `gc`, or lies about the tests alone, shares the interpreter with it and cannot be stopped.
"""

import asyncio
import secrets
import socket
from contextlib import suppress

from tandem.isolation.sandbox_child import KEY_BYTES
from tandem.isolation.sandbox_judge import LENGTH_BYTES


async def passes(connection: socket.socket, tests: str | None) -> bool:
    """Whether the program at the other end of `connection` has ended and passes `tests`, where there are any."""
    if tests is None:
        return False
    reader, writer = await asyncio.open_connection(sock=connection)
    key, text = secrets.token_hex(KEY_BYTES // 2), secrets.token_hex(16)

    async def says(said: str) -> bool:
        return await reader.readline() == f"{key}{said}\n".encode()

    async def answers(source: str, said: str) -> bool:
        content = source.encode(errors="surrogatepass")
        writer.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)
        return await says(said)

    canary, failure = f"raise AssertionError({text!r})", f"AssertionError: {text}"
    try:
        with suppress(ConnectionError, ValueError):  # it ended, or wrote a line without an end
            writer.write(key.encode())
            return await says("") and await answers(tests, "") and await answers(canary, failure)
        return False
    finally:
        writer.close()
