"""uvicorn as all our servers run it: requests that never come to their end are closed, and so are those that are
still there when the server has to leave.

uvicorn waits for ever for the rest of a request's headers; bodies are for `utils/serving/limits.py`.
"""

import asyncio
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

KEEP_ALIVE_S = 75
TIMED_OUT = b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"

# Both of uvicorn's protocols have what is used here; which one it is depends on what is installed.
Base: Any = AutoHTTPProtocol


class TimedProtocol(Base):
    """A connection whose client has begun a request must have sent its headers within a time."""

    receive_timeout_s = 60.0

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._set_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_answering:
            self._cancel_timer()
        elif self._timer is None:
            self._set_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

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
                self.transport.write(TIMED_OUT)
            self.transport.close()


def make_server(app: ASGIApp, *, receive_timeout_s: float, drain_timeout_s: float) -> uvicorn.Server:
    protocol = type("Protocol", (TimedProtocol,), {"receive_timeout_s": receive_timeout_s})
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
