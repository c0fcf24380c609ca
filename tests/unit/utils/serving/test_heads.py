"""What is no part of a body, over real connections: what is taken of it, and what is refused before the app sees it."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tandem.utils.connections import MAX_HEAD_BYTES, MAX_HEADERS
from tandem.utils.ports import listen
from tandem.utils.serving.protocol import MAX_PIPELINED, make_server
from tandem.utils.serving.responses import Answer

LINE = b"POST / HTTP/1.1\r\n"
CHUNKED = LINE + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = LINE + b"Connection: close\r\n\r\n"
LONG = b"x" * (MAX_HEAD_BYTES + 1)
MANY = b"a: b\r\n" * (MAX_HEADERS + 1)


class App:
    """Answers with what it was sent."""

    def __init__(self) -> None:
        self.num_requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        self.num_requests += 1
        body = await Request(scope, receive).body()
        headers = [name.decode() for name, _ in scope["headers"]]  # when the trailers have come
        await Answer({"path": scope["path"][:20], "headers": headers, "body": len(body)})(scope, receive, send)


@contextmanager
def running() -> Iterator[tuple[App, int]]:
    app = App()
    server = make_server(app, receive_timeout_s=60, drain_timeout_s=0.2)
    bound = listen("127.0.0.1", 0)
    bound.listen()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield app, bound.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[App, int]]:
    with running() as started:
        yield started


def ask(port: int, *parts: bytes) -> bytes:
    """All that comes until the server closes the connection."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            while part := connection.recv(65536):
                answer += part
        except ConnectionError:  # it was closed with bytes that it had not read
            pass
    return answer


def bodies(answer: bytes) -> list[dict[str, Any]]:
    """Of answers one after another, which are all 200."""
    parts = [part.partition(b"\r\n\r\n") for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert all(head.startswith(b"200 ") for head, *_ in parts)
    return [json.loads(body) for *_, body in parts]


@pytest.mark.parametrize(
    "sent",
    {
        "value": LINE + b"A: " + LONG,
        "name": LINE + LONG,
        "target": b"POST /" + LONG,
        "empty lines": b"\r\n" * MAX_HEAD_BYTES,
        "headers": LINE + b"a: b\r\n" * MAX_HEAD_BYTES,
        "whole": LINE + b"A: " + LONG + b"\r\n\r\n",
        "whole target": b"POST /" + LONG + b" HTTP/1.1\r\n\r\n",
        "many": LINE + MANY + b"\r\n",
        "trailer": CHUNKED + b"0\r\nA: " + LONG,
        "whole trailer": CHUNKED + b"0\r\nA: " + LONG + b"\r\n\r\n",
        "trailers": CHUNKED + b"0\r\n" + MANY + b"\r\n",
        "extension": CHUNKED + b"1;a=" + LONG,
        "extensions": CHUNKED + (b"1;a=" + LONG[:1000] + b"\r\n \r\n") * 100,
        "size": CHUNKED + b"0" * (MAX_HEAD_BYTES + 1),
    }.items(),
    ids=lambda item: item[0],
)
def test_what_has_no_end_is_refused(server: tuple[App, int], sent: tuple[str, bytes]) -> None:
    head, _, body = ask(server[1], sent[1]).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head
    assert json.loads(body)["error"]["message"].startswith("more than ")


def test_folded_headers_are_not_http(server: tuple[App, int]) -> None:
    answer = ask(server[1], LINE + b"A: b\r\n c\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ") and json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


def test_what_is_large_and_has_an_end_is_taken(server: tuple[App, int]) -> None:
    """One connection: as many headers, and as long ones, as there may be; a large body; a body in tiny pieces."""
    many = LINE + b"a: b\r\n" * MAX_HEADERS + b"\r\n"
    long = LINE + b"A: " + LONG[:-100] + b"\r\n\r\n"
    large = LINE + b"Content-Length: 1000000\r\n\r\n" + b" " * 1_000_000
    pieces = CHUNKED + b"1\r\n \r\n" * 50_000 + b"0\r\n\r\n"
    answered = bodies(ask(server[1], many, long, large, pieces, LAST))
    assert [answer["body"] for answer in answered] == [0, 0, 1_000_000, 50_000, 0]
    assert [len(answer["headers"]) for answer in answered] == [MAX_HEADERS, 1, 1, 1, 1]


@pytest.mark.parametrize("size", [1, 100])
def test_trailers_do_not_reach_the_app(server: tuple[App, int], size: int) -> None:
    sent = CHUNKED + b"2\r\nab\r\n0\r\nAuthorization: Bearer x\r\n\r\n" + LAST
    first, last = bodies(ask(server[1], *(sent[at : at + size] for at in range(0, len(sent), size))))
    assert first == {"path": "/", "headers": ["transfer-encoding"], "body": 2} and last["headers"] == ["connection"]


def test_pipelined_requests_are_answered_in_order_and_only_so_many_wait() -> None:
    with running() as (app, port):
        few = b"".join(b"POST /%d HTTP/1.1\r\n\r\n" % number for number in range(5))
        answered = bodies(ask(port, few + LAST))
        assert [answer["path"] for answer in answered] == ["/0", "/1", "/2", "/3", "/4", "/"]
        app.num_requests = 0
        answer = ask(port, (LINE + b"\r\n") * 10_000)
        assert len(bodies(answer)) == app.num_requests == MAX_PIPELINED + 1


@pytest.mark.parametrize("sent", [b"no HTTP\r\n\r\n", LINE + MANY + b"\r\n"])
def test_a_request_before_a_bad_one_is_answered(server: tuple[App, int], sent: bytes) -> None:
    [answer] = bodies(ask(server[1], b"POST /good HTTP/1.1\r\n\r\n" + sent))
    assert answer["path"] == "/good"
