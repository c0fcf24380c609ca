"""Whether a port can be had, and the nearest one that can."""

import socket

import pytest

from tandem.utils.errors import UserError
from tandem.utils.ports import bind_or_refuse, nearest_free_port, port_is_free


def test_a_taken_port_is_refused_with_one_that_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        free = nearest_free_port("127.0.0.1", port)
        assert free is not None and port < free <= port + 200 and port_is_free("127.0.0.1", free)
        with pytest.raises(
            UserError, match=rf"server\.port = {port} cannot be bound on 127\.0\.0\.1: .*; port \d+ is free"
        ):
            bind_or_refuse("127.0.0.1", port, "server.port")
    assert port_is_free("127.0.0.1", port)


def test_a_free_port_is_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with bind_or_refuse("127.0.0.1", port, "server.port") as bound:
        assert bound.getsockname() == ("127.0.0.1", port)
