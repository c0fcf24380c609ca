"""Whether a port can be had, the nearest one that can, and holding one from the first moment on."""

import os
import socket
import subprocess
import sys

import pytest

from tandem.utils.errors import UserError
from tandem.utils.ports import (
    LISTENING_FD,
    handed_over,
    holder_of,
    inherited_socket,
    listen,
    listen_or_refuse,
    nearest_free_port,
    port_is_free,
)


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def test_a_taken_port_is_refused_with_one_that_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not port_is_free("127.0.0.1", port)
        free = nearest_free_port("127.0.0.1", port)
        assert free is not None and port < free <= port + 200 and port_is_free("127.0.0.1", free)
        with pytest.raises(
            UserError, match=rf"server\.port = {port} cannot be bound on 127\.0\.0\.1: .*; port \d+ is free"
        ):
            listen_or_refuse("127.0.0.1", port, "server.port")
    assert port_is_free("127.0.0.1", port)


def test_whoever_holds_the_port_is_named(free_port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", free_port)),
        pytest.raises(UserError, match=rf"Address already in use by pid {os.getpid()} \(.*py.*\); port \d+ is free"),
    ):
        listen_or_refuse("127.0.0.1", free_port, "server.port")
    assert holder_of(free_port) == ""


def test_who_comes_second_is_refused_although_nobody_is_served_yet(free_port: int) -> None:
    with listen_or_refuse("127.0.0.1", free_port, "server.port"):
        assert not port_is_free("127.0.0.1", free_port)
        for host in ("127.0.0.1", "0.0.0.0"):
            with pytest.raises(UserError, match="cannot be bound"):
                listen_or_refuse(host, free_port, "server.port")


def test_of_two_that_have_bound_the_port_one_can_listen(free_port: int) -> None:
    """Linux lets both bind before either listens; the second must be refused all the same."""
    with socket.socket() as early:
        early.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        early.bind(("127.0.0.1", free_port))
        with listen("127.0.0.1", free_port), pytest.raises(OSError):
            early.listen()


def test_clients_that_come_before_the_model_is_loaded_are_kept(free_port: int) -> None:
    with listen("127.0.0.1", free_port) as listening, socket.create_connection(("127.0.0.1", free_port), 5) as early:
        early.sendall(b"anybody there?")
        accepted, _ = listening.accept()
        with accepted:
            assert accepted.recv(100) == b"anybody there?"


def test_a_socket_is_handed_to_another_process(free_port: int) -> None:
    program = (
        "import os, socket\n"
        "from tandem.utils.ports import listen_or_refuse\n"
        f"taken = listen_or_refuse('127.0.0.1', {free_port}, 'server.port')\n"
        "assert not taken.get_inheritable()\n"
        "print(taken.getsockname()[1])"
    )
    with listen("127.0.0.1", free_port) as listening:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | handed_over(listening),
            pass_fds=[listening.fileno()],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.stdout.strip() == str(free_port), done.stderr


def test_an_inherited_socket_is_taken_once(free_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    listening = listen("127.0.0.1", free_port)
    monkeypatch.setenv(LISTENING_FD, str(listening.detach()))
    inherited = inherited_socket()
    assert inherited is not None and inherited.getsockname() == ("127.0.0.1", free_port)
    with inherited:
        assert inherited_socket() is None
