"""Our HTTP server over real connections: requests that never end, and requests that are left when it ends."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.serving.http.conftest import hello_engine, write_tokenizer
from tests.unit.serving.http.fake_engine import FakeEngine

from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions
from tandem.utils.ports import listen
from tandem.utils.serving import limits
from tandem.utils.serving.protocol import make_server

TIMEOUT_S = 0.5
HEADERS = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "ab", "max_tokens": 2}'


class Running:
    def __init__(self, engine: FakeEngine, port: int, stop: Callable[[], None]) -> None:
        self.engine = engine
        self.port = port
        self.stop = stop
        self.url = f"http://127.0.0.1:{port}"

    def connect(self, *parts: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        for part in parts:
            connection.sendall(part)
        return connection


@contextmanager
def running(folder: Path, receive_timeout_s: float = TIMEOUT_S, **options: Any) -> Iterator[Running]:
    tokenizer = write_tokenizer(folder)
    engine = hello_engine(tokenizer)
    given = replace(ApiOptions(99, 512, receive_timeout_s=receive_timeout_s), **options)
    app = create_app(engine, tokenizer, Path("/models/little"), given)
    server = make_server(app, receive_timeout_s=receive_timeout_s, drain_timeout_s=0.2)
    bound = listen("127.0.0.1", 0)
    bound.listen()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()

    def stop() -> None:
        server.should_exit = True

    try:
        yield Running(engine, bound.getsockname()[1], stop)
    finally:
        stop()
        engine.go.set()
        thread.join(60)
        assert not thread.is_alive()


def read_all(connection: socket.socket) -> bytes:
    """What the server sends until it closes the connection."""
    content = b""
    with connection:
        while part := connection.recv(65536):
            content += part
    return content


@pytest.mark.parametrize("sent", [[], [b"POST /v1/comp"], [HEADERS], [HEADERS, b"X-A: 1\r\n"]])
def test_headers_that_never_end_are_given_up(tmp_path: Path, sent: list[bytes]) -> None:
    with running(tmp_path) as server:
        answer = read_all(server.connect(*sent))
        assert answer.startswith(b"HTTP/1.1 408 ")


def test_the_second_request_of_a_connection_has_to_end_too(tmp_path: Path) -> None:
    whole = HEADERS + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    with running(tmp_path) as server:
        connection = server.connect(whole)
        answer = b""
        while b'"usage"' not in answer:
            answer += connection.recv(65536)
        connection.sendall(HEADERS)
        assert read_all(connection) == b"" and answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("length", [b"Content-Length: 999\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n9\r\n"])
def test_a_body_that_never_ends_is_given_up(tmp_path: Path, length: bytes) -> None:
    with running(tmp_path) as server:
        answer = read_all(server.connect(HEADERS, length, b'{"prompt'))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head.lower()
        assert "receive_timeout_s" in json.loads(body)["error"]["message"]


def test_a_body_that_drips_is_given_up_too(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        connection = server.connect(HEADERS, b"Content-Length: 99999\r\n\r\n")
        started, num_sent = time.monotonic(), 0
        with pytest.raises(OSError):
            while time.monotonic() - started < 60:
                connection.sendall(b" ")
                num_sent += 1
                time.sleep(TIMEOUT_S / 10)
        assert num_sent > 1
        connection.close()


def test_a_slow_answer_is_not_a_slow_request(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.engine.step_s = TIMEOUT_S / 2
        for stream in (False, True):
            body = {"prompt": "ab", "max_tokens": 4, "stream": stream}
            assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False).status_code == 200


def test_bodies_that_arrive_share_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ARRIVING", 2)
    with running(tmp_path, receive_timeout_s=60, max_body_bytes=1000) as server:
        half_sent = [server.connect(HEADERS, b"Content-Length: 900\r\n\r\n", b" " * 800) for _ in range(2)]
        time.sleep(0.1)
        deadline = time.monotonic() + 60
        while True:  # the first two may not have been read yet
            last = server.connect(HEADERS, b"Content-Length: 900\r\n\r\n", b" " * 800)
            last.settimeout(1)
            try:
                answer = last.recv(65536)
                break
            except TimeoutError:
                half_sent.append(last)
                assert time.monotonic() < deadline
        last.close()
        assert answer.startswith(b"HTTP/1.1 429 ") and b"retry-after" in answer.lower()
        for connection in half_sent:
            connection.close()
        body = json.dumps({"prompt": "ab", "max_tokens": 2})
        headers = {"Content-Type": "application/json"}
        while (
            httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, trust_env=False).status_code
            != 200
        ):
            assert time.monotonic() < deadline


SHUTTING_DOWN = {
    "message": "the server is shutting down",
    "type": "server_error",
    "param": None,
    "code": "shutting_down",
}


def test_whoever_still_waits_when_the_server_leaves_is_told_so(tmp_path: Path) -> None:
    """Whole answers and streams that have not begun; a body that is still arriving."""
    kinds = {"whole": {"prompt": "ab"}, "stream": {"prompt": "ab", "stream": True}}
    answers: dict[str, httpx.Response] = {}

    def ask(url: str, name: str) -> None:
        answers[name] = httpx.post(f"{url}/v1/completions", json=kinds[name], timeout=60, trust_env=False)

    with running(tmp_path, receive_timeout_s=60) as server:
        server.engine.go.clear()
        arriving = server.connect(HEADERS, b"Content-Length: 900\r\n\r\n", b'{"prompt')
        threads = [threading.Thread(target=ask, args=(server.url, name)) for name in kinds]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(server.engine.open) == 2)
        server.stop()
        for thread in threads:
            thread.join(60)
        told = read_all(arriving)
    for name, answer in answers.items():
        assert answer.status_code == 503 and answer.json()["error"] == SHUTTING_DOWN, name
    assert told.startswith(b"HTTP/1.1 503 ") and json.loads(told.partition(b"\r\n\r\n")[2])["error"] == SHUTTING_DOWN
    assert not server.engine.open


def test_a_stream_that_has_begun_ends_with_the_error(tmp_path: Path) -> None:
    body = {"prompt": "ab", "stream": True, "ignore_eos": True, "max_tokens": 400}
    with running(tmp_path) as server:
        server.engine.step_s = 0.05
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            lines = (line for line in answer.iter_lines() if line)
            first = next(lines)
            server.stop()
            *_, error, last = lines
    assert "choices" in json.loads(first.removeprefix("data: "))
    assert json.loads(error.removeprefix("data: "))["error"] == SHUTTING_DOWN and last == "data: [DONE]"


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
