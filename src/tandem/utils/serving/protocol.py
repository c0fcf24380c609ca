"""uvicorn as all our servers run it: what is no part of a body is bounded, requests that never come to their end are
closed, and so are those that are still there when the server has to leave.

uvicorn and its parser, httptools, take headers without end, copy what they have of one with every read, and wait for
ever for the rest. Bodies are for `limits.py`.
"""

import asyncio
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tandem.utils.connections import CHUNK_LINE_BYTES, MAX_HEAD_BYTES, MAX_HEADERS
from tandem.utils.serving.responses import error_answer

KEEP_ALIVE_S = 75
MAX_PIPELINED = 16  # requests of one connection that wait for the answer of another
TOO_LARGE = f"more than {MAX_HEAD_BYTES >> 10} KiB of headers and trailers"


class Refused(Exception):
    """A request, while it is parsed."""


class BoundedProtocol(HttpToolsProtocol):
    """A connection whose client has begun a request must send its headers within a time, and within a size."""

    receive_timeout_s = 60.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timer: asyncio.TimerHandle | None = None
        self._num_around = 0  # bytes of this request that are neither body nor what a body needs around it
        self._problem: tuple[int, str] = (400, "the request is not HTTP")
        self._is_refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._num_around += len(data)
        super().data_received(data)
        if self._num_around > MAX_HEAD_BYTES and not self._is_refused:
            self._refuse(431, TOO_LARGE)
        if self._is_answering:
            self._cancel_timer()
        elif self._timer is None:
            self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def on_headers_complete(self) -> None:
        self._measure()
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(429, f"more than {MAX_PIPELINED} requests at once on one connection")
        super().on_headers_complete()
        if not self.parser.should_upgrade():  # pyright: ignore[reportOptionalMemberAccess]
            self.headers = []  # trailers come here, and not into what the app has

    def on_chunk_header(self) -> None:
        self._allow(CHUNK_LINE_BYTES)

    def on_body(self, body: bytes) -> None:
        self._allow(2 * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.headers:
            self._measure()
        self._num_around = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's, for what its parser refuses."""
        self._refuse(*self._problem)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _measure(self) -> None:
        """Headers, or trailers, that are whole: what came with them may belong to the next request."""
        if len(self.headers) > MAX_HEADERS:
            self._stop(431, f"more than {MAX_HEADERS} headers")
        num_bytes = len(self.url)
        for name, value in self.headers:
            num_bytes += len(name) + len(value)
        if num_bytes > MAX_HEAD_BYTES:
            self._stop(431, TOO_LARGE)

    def _allow(self, num_bytes: int) -> None:
        self._num_around = max(0, self._num_around - num_bytes)

    def _stop(self, status: int, message: str) -> None:
        self._problem = status, message
        raise Refused

    def _refuse(self, status: int, message: str) -> None:
        """Say so, unless other answers are under way; read no further."""
        self._is_refused = True
        if self._is_answering and not self.cycle.more_body:  # it is the next request: those before it are answered
            self.cycle.keep_alive = False
            return
        if not self._is_answering or not (self.cycle.response_started or self.pipeline):
            self.transport.write(refusal(status, message))
        self.transport.close()

    def _set_timer(self) -> None:
        self._timer = self.loop.call_later(self.receive_timeout_s, self._end)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._timer = None
        is_ours = self.transport.get_protocol() is self  # a connection may have become a WebSocket
        if is_ours and not self._is_answering and not self.transport.is_closing():
            if self.cycle is None:
                self.transport.write(refusal(408, "the headers did not arrive in time"))
            self.transport.close()


def refusal(status: int, message: str) -> bytes:
    """An answer, after which the connection ends."""
    answer = error_answer(status, message)
    answer.headers["connection"] = "close"
    lines = [STATUS_LINE[status], *(b"%s: %s\r\n" % header for header in answer.raw_headers)]
    return b"".join([*lines, b"\r\n", bytes(answer.body)])


def bound_every_connection(receive_timeout_s: float) -> None:
    """Of a uvicorn that is not started by `make_server`, which may have looked up its own protocol already."""

    def make(cls: type, *arguments: Any, **named: Any) -> Any:
        return object.__new__(BoundedProtocol if cls is HttpToolsProtocol else cls)

    BoundedProtocol.receive_timeout_s = receive_timeout_s
    HttpToolsProtocol.__new__ = staticmethod(make)


def make_server(app: ASGIApp, *, receive_timeout_s: float, drain_timeout_s: float) -> uvicorn.Server:
    protocol = type("Protocol", (BoundedProtocol,), {"receive_timeout_s": receive_timeout_s})
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http=protocol,
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_graceful_shutdown=drain_timeout_s,  # pyright: ignore[reportArgumentType]
            timeout_keep_alive=KEEP_ALIVE_S,
        )
    )
