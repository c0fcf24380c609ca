"""The last answer: what still waits when a server has to leave is told so.

uvicorn cancels what runs once the drain timeout has passed, and would answer with a plain 500 or break off a stream.
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.utils.serving.responses import error_answer, error_event

REASON = "the server is shutting down"
CODE = "shutting_down"


class AnswerWhenClosing:
    """Middleware, around everything that may wait. Only the server itself cancels a request."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begun: Message | None = None
        is_over = False

        async def watched(message: Message) -> None:
            nonlocal begun, is_over
            if message["type"] == "http.response.start":
                begun = message
            elif message["type"] == "http.response.body":
                is_over = not message.get("more_body", False)
            await send(message)

        try:
            await self.app(scope, receive, watched)
        except asyncio.CancelledError:
            if begun is None:
                await error_answer(503, REASON, code=CODE)(scope, receive, send)
            elif is_stream(begun) and not is_over:
                last = error_event(503, REASON, CODE)
                await send({"type": "http.response.body", "body": last, "more_body": False})
            else:
                raise


def is_stream(begun: Message) -> bool:
    return any(name.lower() == b"content-type" and b"event-stream" in value for name, value in begun["headers"])
