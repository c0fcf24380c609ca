"""How large a body may be and how long it may take to arrive. Counted as it arrives, since a chunked body does not
say how long it will be."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.utils.serving.responses import error_answer

# Bodies that are still arriving hold at most so many times the memory of the largest one.
MAX_ARRIVING = 16


class LimitBody:
    """Middleware. `server.max_body_mb` sets the size."""

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.timeout_s = timeout_s
        self.message = f"the body is larger than server.max_body_mb allows: {max_bytes >> 20} MiB"
        self.num_arriving = 0  # bytes of bodies whose end has not come yet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > self.max_bytes):
            await error_answer(413, self.message)(scope, receive, send)
            return
        body = Arriving(self, receive)
        try:
            await self.app(scope, body.receive, send)
        finally:
            body.forget()


class Arriving:
    """The body of one request."""

    def __init__(self, limits: LimitBody, receive: Receive) -> None:
        self._limits = limits
        self._receive = receive
        self._deadline = asyncio.get_running_loop().time() + limits.timeout_s
        self._num_bytes = 0
        self._is_complete = False

    async def receive(self) -> Message:
        if self._is_complete:  # what comes now is that the client has gone away
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            waited = f"the body did not arrive within server.receive_timeout_s = {self._limits.timeout_s:g} s"
            raise HTTPException(408, waited, {"Connection": "close"}) from None
        self._count(len(message.get("body", b"")))
        if not message.get("more_body", False):
            self._is_complete = True
            self.forget()
        return message

    def _count(self, num_bytes: int) -> None:
        limits = self._limits
        self._num_bytes += num_bytes
        limits.num_arriving += num_bytes
        if self._num_bytes > limits.max_bytes:
            raise HTTPException(413, limits.message)
        if limits.num_arriving > MAX_ARRIVING * limits.max_bytes:
            message = f"bodies of {limits.num_arriving >> 20} MiB are arriving already; come back later"
            raise HTTPException(429, message, {"Connection": "close", "Retry-After": "1"})

    def forget(self) -> None:
        self._limits.num_arriving -= self._num_bytes
        self._num_bytes = 0
