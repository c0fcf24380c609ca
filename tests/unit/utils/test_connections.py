"""Connections that are kept, against a server that says byte for byte what it is told to."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.patience import PATIENCE
from tests.ports import free_port

from tandem.utils import connections, http
from tandem.utils.connections import Answer, Connections, NotHttp, Parser
from tandem.utils.http import HttpClient, Unreachable

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Bytes:
    """A server: what it was sent, connection by connection, and how it answers each request."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)  # None: none
        self.received: list[bytes] = []
        self.num_connections = 0
        self.num_left = 0  # by clients
        self.closes = False  # after each answer
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        while data := await reader.read(2**20):
            self.received.append(data)
            answer = self.answers.pop(0)
            if answer is not None:
                writer.write(answer)
            if self.closes:
                break
        else:
            self.num_left += 1
        writer.close()


@asynccontextmanager
async def serving(server: Bytes) -> AsyncIterator[int]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    try:
        yield listening.sockets[0].getsockname()[1]
    finally:
        for writer in server.writers:
            writer.close()
        listening.close()


def use(server: Bytes, body: Callable[[Connections], Awaitable[None]], **options: int) -> None:
    async def run() -> None:
        async with serving(server) as port, asyncio.timeout(60 * PATIENCE):
            pool = Connections("127.0.0.1", port, {"Authorization": "Bearer secret"}, **options)
            await body(pool)
            await pool.close()

    asyncio.run(run())


def test_a_connection_is_used_again_and_says_all_that_a_server_needs() -> None:
    server = Bytes(OK, OK)

    async def ask(pool: Connections) -> None:
        for target in ("/a", "/b"):
            answer = await pool.request("POST", target, b'{"n":1}')
            assert (answer.status, answer.body, answer.headers["content-length"]) == (200, b"ok", "2")

    use(server, ask)
    assert server.num_connections == 1
    first, *lines = server.received[1].decode().split("\r\n")
    assert first == "POST /b HTTP/1.1" and lines[-2:] == ["", '{"n":1}']
    assert {"Content-Length: 7", "Content-Type: application/json", "Authorization: Bearer secret"} < set(lines)


def test_transports_of_other_event_loops_do() -> None:
    """Ray runs its workers on uvloop, whose transports are not asyncio's by their class."""
    uvloop = pytest.importorskip("uvloop")

    async def ask() -> None:
        async with serving(Bytes(OK)) as port, asyncio.timeout(60 * PATIENCE):
            pool = Connections("127.0.0.1", port, {})
            assert (await pool.request("GET", "/")).body == b"ok"
            await pool.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(ask())


CHUNKS = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3;x=1\r\nabc\r\n2\r\nde\r\n0\r\nLate: yes\r\n\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n" + OK
PIECES = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n"
NOTHING = b"HTTP/1.1 204 No Content\r\nX: 1\r\n\r\n"


@pytest.mark.parametrize(
    ("said", "status", "body"),
    [
        (OK, 200, b"ok"),
        (CHUNKS, 200, b"abcde"),
        (PIECES, 200, b" " * 20_000),
        (CONTINUE, 200, b"ok"),
        (NOTHING, 204, b""),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_an_answer_is_read_however_it_is_cut(said: bytes, status: int, body: bytes, size: int) -> None:
    parser = Parser()
    answers = [parser.feed(said[at : at + size]) for at in range(0, len(said), size)]
    assert answers[:-1] == [None] * (len(answers) - 1)
    last = answers[-1]
    assert isinstance(last, Answer) and (last.status, last.body) == (status, body) and parser.may_continue


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 xyz\r\n\r\n",
        b"HTTP/2.0 200 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-6\r\n\r\n",
        b"x" * (2**16 + 1),
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 101 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nA: " + b"x" * 2**16 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 10_000,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"0" * (2**16 + 1),
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"x" * 2**16 + b"\r\n \r\n0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + (b"1;" + b"x" * 1000 + b"\r\n \r\n") * 100,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"a: b\r\n" * 20_000,
    ],
    ids=range(16),
)
def test_what_is_not_http_is_an_error(said: bytes) -> None:
    with pytest.raises(NotHttp, match="the answer is not HTTP"):
        Parser().feed(said)


def test_an_answer_may_end_with_its_connection() -> None:
    server = Bytes(b"HTTP/1.0 200 OK\r\n\r\nall of it", OK)
    server.closes = True

    async def ask(pool: Connections) -> None:
        assert (await pool.request("GET", "/")).body == b"all of it"
        assert (await pool.request("GET", "/")).body == b"ok"

    use(server, ask)
    assert server.num_connections == 2


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nok", CHUNKS[:-1]])
def test_a_connection_that_ends_too_soon_is_an_error(said: bytes) -> None:
    server = Bytes(said)
    server.closes = True

    async def ask(pool: Connections) -> None:
        with pytest.raises(ConnectionError):
            await pool.request("GET", "/")

    use(server, ask)


@pytest.mark.parametrize(
    "said", [OK + b"more", b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok", CHUNKS + b"more"]
)
def test_a_connection_of_which_more_may_come_is_not_used_again(said: bytes) -> None:
    server = Bytes(said, OK)

    async def ask(pool: Connections) -> None:
        assert (await pool.request("GET", "/")).status == 200
        assert (await pool.request("GET", "/")).body == b"ok"

    use(server, ask)
    assert server.num_connections == 2


def test_a_server_that_closed_an_idle_connection_is_not_noticed() -> None:
    server = Bytes(OK, OK)
    server.closes = True

    async def ask(pool: Connections) -> None:
        await pool.request("GET", "/")
        while pool._idle:
            await asyncio.sleep(0.001)
        await pool.request("GET", "/")

    use(server, ask)
    assert server.num_connections == 2


def test_a_connection_that_lay_idle_for_long_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Bytes(OK, OK)

    async def ask(pool: Connections) -> None:
        await pool.request("GET", "/")
        monkeypatch.setattr(connections, "KEEP_S", -1.0)
        await pool.request("GET", "/")
        while not server.num_left:
            await asyncio.sleep(0.001)

    use(server, ask)
    assert server.num_connections == 2


def test_the_server_learns_that_a_request_was_called_off() -> None:
    server = Bytes(None)

    async def ask(pool: Connections) -> None:
        asking = asyncio.ensure_future(pool.request("POST", "/", b"{}"))
        while not server.received:
            await asyncio.sleep(0.001)
        asking.cancel()
        while not server.num_left:
            await asyncio.sleep(0.001)

    use(server, ask)


def test_no_more_connections_than_the_limit() -> None:
    server = Bytes(*[OK] * 20)

    async def ask(pool: Connections) -> None:
        await asyncio.gather(*(pool.request("GET", "/") for _ in range(20)))

    use(server, ask, limit=3)
    assert 1 <= server.num_connections <= 3


def test_another_address_of_a_name_is_tried_and_the_name_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Bytes(OK, OK)
    looked_up: list[str] = []

    async def ask() -> None:
        async with serving(server) as port:

            async def look_up(host: str, port: int, **_: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
                looked_up.append(host)
                return [(2, 1, 6, "", (address, port)) for address in ("127.0.0.2", "127.0.0.1")]

            pool = Connections("node-7", port, {})
            monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
            await asyncio.gather(pool.request("GET", "/"), pool.request("GET", "/"))
            await pool.close()

    asyncio.run(ask())
    assert looked_up == ["node-7"] and b"Host: node-7:" in server.received[0]


def test_a_redirect_is_followed() -> None:
    async def there(request: web.Request) -> web.Response:
        return web.json_response(await request.json())

    async def here(request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect("/there")

    async def run() -> bytes:
        app = web.Application()
        app.router.add_post("/here", here)
        app.router.add_post("/there", there)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        client = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=60)
        reply = await client.send("POST", "/here", {"n": 1})
        await client.close()
        await runner.cleanup()
        return reply.body

    assert asyncio.run(run()) == b'{"n": 1}'


@pytest.mark.parametrize(
    "url",
    ["https://host", "http://user:key@host", "http://höst", "http://host/with space", "http://host/a?key=1", "host:80"],
)
def test_addresses_that_need_more_are_left_to_aiohttp(url: str) -> None:
    assert HttpClient(url, timeout_s=1)._plain is None
    assert HttpClient("http://host:80/prefix/", "a key\n", timeout_s=1)._plain is None


def test_a_server_that_is_not_there_is_unreachable() -> None:
    async def run() -> None:
        client = HttpClient(f"http://127.0.0.1:{free_port()}", timeout_s=60)
        with pytest.raises(Unreachable, match="ConnectionRefusedError"):
            await client.send("GET", "/health")
        await client.close()

    asyncio.run(run())


def test_an_idle_connection_keeps_nothing_of_the_answer() -> None:
    server = Bytes(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + b"x" * 100_000)

    async def ask(pool: Connections) -> None:
        assert len((await pool.request("GET", "/")).body) == 100_000
        (idle,) = pool._idle
        assert idle._parser._body == []

    use(server, ask)


def test_the_kernel_watches_for_the_end_of_the_other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every connection, those of aiohttp included."""
    watched: list[socket.socket] = []
    monkeypatch.setattr(http, "watch_peer", lambda made: watched.append(made) or connections.watch_peer(made))

    def check(connection: socket.socket) -> None:
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) != 0
        if sys.platform.startswith("linux"):
            named = ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT")
            read = [connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, name)) for name in named]
            assert read == [10, 10, 5, 60_000]

    async def ask(pool: Connections) -> None:
        await pool.request("GET", "/")
        (idle,) = pool._idle
        check(idle.transport.get_extra_info("socket"))
        client = HttpClient(f"http://{pool.host}:{pool.port}", timeout_s=60)
        async with client.open("GET", "/") as response:
            assert await response.read() == b"ok"
            check(watched[0])
        await client.close()

    use(Bytes(OK, OK), ask)
