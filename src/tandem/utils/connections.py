"""HTTP/1.1 over connections that are kept, for ten thousand small requests under way at once.

It does what requests between the processes of a run need: a body of bytes there, a whole answer back, no TLS, no
redirects, no compression. aiohttp takes three times the CPU for that (docs/log.md); it has everything else.
"""

import asyncio
import socket
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from multidict import CIMultiDict

KEEP_S = 15.0  # how long a connection is kept without a request
KNOWN_S = 10.0  # how long the addresses of a name are
CONNECT_S = 10.0  # for each of several addresses
PROBE_S = 10  # a connection on which nothing comes is probed so often
DEAD_S = 60  # without any sign of the other machine's kernel
MAX_HEAD_BYTES = 2**16  # of headers and trailers, those that we send and those that we take
MAX_HEADERS = 100
CHUNK_LINE_BYTES = 16  # that every chunk of a body may have around it


def watch_peer(connection: "SocketOptions") -> None:
    """Have the kernel end the connection where the other machine is gone: one that lost its power, or its network,
    closes none. A machine that is there answers the probes, however long its programs are silent."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {"TCP_KEEPIDLE": PROBE_S, "TCP_KEEPINTVL": PROBE_S, "TCP_KEEPCNT": DEAD_S // PROBE_S - 1}
    options["TCP_USER_TIMEOUT"] = DEAD_S * 1000  # the same for data that is not acknowledged
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class SocketOptions(Protocol):
    """Of a socket, or of what an event loop shows of one."""

    def setsockopt(self, level: int, option: int, value: int, /) -> object: ...


class NotHttp(ConnectionError):
    """What came is no answer."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes


class Parser:
    """One answer, fed to httptools as it comes, which calls the methods below."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: CIMultiDict[str] = CIMultiDict()
        self.may_continue = False  # whether another request may follow on the connection
        self._http: HttpResponseParser | None = HttpResponseParser(self)
        self._body: list[bytes] = []
        self._answer: Answer | None = None
        self._num_headers = 0
        self._num_around = 0  # bytes of headers and of what is around chunks
        self._ends_with_connection = False

    def feed(self, data: bytes) -> Answer | None:
        """The answer, if this was the last of it. Raises NotHttp."""
        assert self._http is not None, "an answer has one end"
        self._num_around += len(data)
        try:
            self._http.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            if self._answer is None:
                raise NotHttp(f"the answer is not HTTP: {error.__context__ or error}") from error
            self.may_continue = False  # what is not HTTP came behind it
        if self._num_around > MAX_HEAD_BYTES:
            raise NotHttp(f"the answer is not HTTP: more than {MAX_HEAD_BYTES} bytes of headers")
        if self._answer is not None:
            self._http = None  # the two hold each other
        return self._answer

    def end(self) -> Answer | None:
        """The answer, if it ends with the connection."""
        return self._whole() if self._ends_with_connection else None

    def on_message_begin(self) -> None:
        self.may_continue = False  # also where another answer follows, which nobody asked for

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise ValueError(f"more than {MAX_HEADERS} headers")
        if not self.status:  # else it is a trailer
            self.headers.add(name.decode("utf-8", "surrogateescape"), value.decode("utf-8", "surrogateescape"))

    def on_headers_complete(self) -> None:
        assert self._http is not None
        status, version = self._http.get_status_code(), self._http.get_http_version()
        if version not in ("1.1", "1.0"):
            raise ValueError(f"its version is {version}")
        if status < 200:  # the answer itself is still to come
            self.headers.clear()
            return
        encoding = self.headers.get("Transfer-Encoding")
        if encoding is not None and encoding.lower() != "chunked":
            raise ValueError(f"Transfer-Encoding {encoding!r} was not asked for")
        self.status = status
        self.may_continue = self._http.should_keep_alive()
        self._ends_with_connection = encoding is None and "Content-Length" not in self.headers

    def on_chunk_header(self) -> None:
        self._allow(CHUNK_LINE_BYTES)

    def on_body(self, body: bytes) -> None:
        self._allow(2 * len(body))
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self.status and self._answer is None:
            self._answer = self._whole()

    def _whole(self) -> Answer:
        return Answer(self.status, self.headers, b"".join(self._body))

    def _allow(self, num_bytes: int) -> None:
        self._num_around = max(0, self._num_around - num_bytes)


class Connection(asyncio.Protocol):
    """One request at a time. While it has none it lies among the idle ones, unless it is lost."""

    transport: asyncio.Transport

    def __init__(self, idle: "dict[Connection, float]") -> None:
        self._idle = idle
        self._parser = Parser()
        self._waiting: asyncio.Future[Answer] | None = None
        self._may_continue = False
        self._is_lost = False

    @property
    def is_usable(self) -> bool:
        unsent = self.transport.get_write_buffer_size()
        return self._may_continue and not self.transport.is_closing() and not unsent

    async def exchange(self, request: bytes) -> Answer:
        self._waiting = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        if self._is_lost:
            self._fail(None)
        try:
            return await self._waiting
        finally:
            self._waiting = None
            self._may_continue = self._parser.may_continue
            self._parser = Parser()  # the answer is not kept: thousands of connections may lie idle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop's, as in a Ray worker, is none by its class
        watch_peer(transport.get_extra_info("socket"))

    def data_received(self, data: bytes) -> None:
        if self._waiting is None or self._waiting.done():  # more than was asked for
            self.transport.abort()
            return
        try:
            answer = self._parser.feed(data)
        except NotHttp as error:
            self._fail(error)
            return
        if answer is not None:
            self._waiting.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        self._idle.pop(self, None)
        self._fail(exc)

    def _fail(self, error: Exception | None) -> None:
        if self._waiting is None or self._waiting.done():
            return
        answer = self._parser.end() if error is None else None
        if answer is not None:
            self._waiting.set_result(answer)
        else:
            self._waiting.set_exception(error or ConnectionResetError("the server closed the connection"))


class Connections:
    """To one server, as many as there are requests under way, or up to a limit (0: any number). `headers` go with every
    request."""

    def __init__(self, host: str, port: int, headers: Mapping[str, str], limit: int = 0) -> None:
        self.host = host
        self.port = port
        shown = f"[{host}]" if ":" in host else host
        lines = {"Host": f"{shown}:{port}", "User-Agent": "tandem", "Accept": "*/*", **headers}
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._slots = asyncio.Semaphore(limit) if limit else nullcontext()
        self._idle: dict[Connection, float] = {}  # since when, oldest first
        self._looking_up = asyncio.Lock()
        self._addresses: list[str] = []
        self._known_until = 0.0

    async def request(self, method: str, target: str, json: bytes | None = None) -> Answer:
        """Raises OSError, of which NotHttp is one."""
        body = json or b""
        described = "" if json is None else "Content-Type: application/json\r\n"
        if method != "GET":
            described += f"Content-Length: {len(body)}\r\n"
        head = f"{method} {target} HTTP/1.1\r\n{self._lines}{described}\r\n"
        async with self._slots:
            connection = self._newest() or await self._connect()
            try:
                answer = await connection.exchange(head.encode() + body)
            except BaseException:  # cleans up
                connection.transport.abort()  # the server learns that nobody waits any more
                raise
            if connection.is_usable:
                self._idle[connection] = time.monotonic()
            else:
                connection.transport.close()
            return answer

    async def close(self) -> None:
        while self._idle:
            self._idle.popitem()[0].transport.abort()
        await asyncio.sleep(0)  # for them to be told

    def _newest(self) -> Connection | None:
        """The idle one that was used last; those that were not for long are closed."""
        long_ago = time.monotonic() - KEEP_S
        while self._idle and self._idle[oldest := next(iter(self._idle))] < long_ago:
            del self._idle[oldest]
            oldest.transport.abort()
        return self._idle.popitem()[0] if self._idle else None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        addresses = await self._look_up()
        problem: OSError | None = None
        for address in addresses:
            try:
                async with asyncio.timeout(CONNECT_S if len(addresses) > 1 else None):
                    _, connection = await loop.create_connection(lambda: Connection(self._idle), address, self.port)
                return connection
            except OSError as error:
                problem = error
        assert problem is not None, "a name has an address"
        raise problem

    async def _look_up(self) -> list[str]:
        """The server's addresses. Thousands of connections may be opened at once; the name is looked up once."""
        async with self._looking_up:
            if time.monotonic() > self._known_until:
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
                self._addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
                self._known_until = time.monotonic() + KNOWN_S
        return self._addresses
