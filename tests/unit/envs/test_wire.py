"""Messages between the orchestrator and the process of an environment."""

import socket

from tandem.envs.wire import Channel


def test_messages_to_a_side_that_is_gone_are_dropped() -> None:
    """As when a run ends while completions are being scored."""
    here, there = socket.socketpair()
    with here:
        channel = Channel(here)
        there.close()
        channel.send({"started": 1})
        channel.send({"call": 1})
        assert channel.receive() is None


def test_a_side_that_left_messages_unread_is_gone_too() -> None:
    here, there = socket.socketpair()
    with here:
        channel = Channel(here)
        channel.send({"started": 1})
        there.close()
        assert channel.receive() is None
