"""How large a body may be. Counted as it arrives, since a chunked body does not say how long it will be."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.inference.responses import error_answer


class LimitBody:
    """Middleware."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes
        self.message = f"the body is larger than server.max_body_mb allows: {max_bytes >> 20} MiB"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        announced = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > self.max_bytes):
            await error_answer(413, self.message)(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self.max_bytes:
                raise HTTPException(413, self.message)
            return message

        await self.app(scope, counted, send)
