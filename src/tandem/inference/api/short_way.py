"""The short way to a route that generates. FastAPI's own takes longer than reading the request, generating on a small
model and answering together, and hundreds of requests arrive at once.

    body as it should be ─► the route's function        any other body ─► FastAPI, which says what is wrong with it
"""

from typing import get_type_hints

from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.inference.api.errors import ClientGone

LONG_WAY = "tandem.long_way"  # in the scope of a request that has been here


class ShortWay(BaseRoute):
    """To the function of `route`, which takes a body and a request. What this does not take, `router` does."""

    def __init__(self, router: ASGIApp, route: APIRoute) -> None:
        self.path = route.path
        self._router = router
        self._body_type: type[BaseModel] = get_type_hints(route.endpoint)["body"]
        self._endpoint = route.endpoint

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        is_ours = scope["type"] == "http" and scope["path"] == self.path and scope["method"] == "POST"
        if not is_ours or scope["query_string"] or LONG_WAY in scope:
            return Match.NONE, {}
        return Match.FULL, {"route": self}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        content = await read_body(receive)
        try:
            body = self._body_type.model_validate(from_json(content))
        except (ValidationError, ValueError, RecursionError):
            scope[LONG_WAY] = True
            await self._router(scope, Replay(content, receive).receive, send)
            return
        response = await self._endpoint(body, Request(scope, receive))
        await response(scope, receive, send)


async def read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


class Replay:
    """A body that was read, for whoever reads it again."""

    def __init__(self, content: bytes, receive: Receive) -> None:
        self._content: bytes | None = content
        self._receive = receive

    async def receive(self) -> Message:
        if self._content is None:
            return await self._receive()
        content, self._content = self._content, None
        return {"type": "http.request", "body": content, "more_body": False}
