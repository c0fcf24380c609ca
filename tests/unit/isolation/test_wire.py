"""Messages between the orchestrator and the process of an environment."""

import asyncio
import socket

from tandem.isolation.wire import AT_ONCE, Payload, frame, messages


async def received(reader: asyncio.StreamReader) -> list[Payload]:
    return [message async for message in messages(reader)]


def test_what_was_sent_is_read_to_the_end_before_the_other_side_is_found_to_be_gone() -> None:
    sent = [{"call": number, "value": 10**30, "text": "\ud83d"} for number in range(3 * AT_ONCE + 1)]

    async def run() -> list[Payload]:
        here, there = socket.socketpair()
        there.sendall(b"".join(map(frame, sent)) + b"half a message")
        there.close()
        reader, writer = await asyncio.open_connection(sock=here)
        try:
            return await received(reader)
        finally:
            writer.close()

    assert asyncio.run(run()) == sent


def test_a_side_that_left_messages_unread_is_gone_too() -> None:
    async def run() -> list[Payload]:
        here, there = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=here)
        writer.write(frame({"call": 1}))
        there.close()
        return await received(reader)

    assert asyncio.run(run()) == []


def test_others_have_their_turn_between_messages_that_came_at_once() -> None:
    async def run() -> None:
        reader = asyncio.StreamReader()
        for number in range(10 * AT_ONCE):
            reader.feed_data(frame({"call": number}))
        reading = asyncio.ensure_future(received(reader))
        for _ in range(5):
            await asyncio.sleep(0)
        assert reader._buffer  # pyright: ignore[reportAttributeAccessIssue]
        reader.feed_eof()
        assert len(await reading) == 10 * AT_ONCE

    asyncio.run(run())
