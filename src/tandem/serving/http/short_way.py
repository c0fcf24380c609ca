"""The short way to a route that generates. FastAPI's own takes longer than all else that is done for a request, and
hundreds of requests arrive at once.

    body as it should be ─► the route's function        any other body ─► FastAPI, which says what is wrong with it
"""

from typing import Any, get_type_hints

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.serving.http.errors import ClientGone


class ShortWay:
    """Middleware around FastAPI's own stack. `routes`: whose functions take a body and a request. Errors are answered
    by the handlers of `python`."""

    def __init__(self, app: ASGIApp, api: FastAPI, routes: list[APIRoute]) -> None:
        self.app = app
        self._handlers: dict[Any, Any] = api.exception_handlers
        self._routes = {route.path: route for route in routes}
        self._bodies: dict[str, type[BaseModel]] = {
            route.path: get_type_hints(route.endpoint)["body"] for route in routes
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_known = scope["type"] == "http" and scope["path"] in self._routes
        if not is_known or scope["method"] != "POST" or scope["query_string"]:
            await self.app(scope, receive, send)
            return
        http = Request(scope, receive)
        scope["route"] = self._routes[scope["path"]]
        try:
            content = await read_body(receive)
            try:
                body = self._bodies[scope["path"]].model_validate(from_json(content))
            except (ValueError, RecursionError):  # not JSON, or not such a body
                await self.app(scope, Replay(content, receive).receive, send)
                return
            response: Response = await scope["route"].endpoint(body, http)
        except Exception as error:
            await self._answer(error, http, send)
            return
        await response(scope, receive, send)

    async def _answer(self, error: Exception, http: Request, send: Send) -> None:
        kind = next(kind for kind in type(error).__mro__ if kind in self._handlers)
        response = await self._handlers[kind](http, error)
        await response(http.scope, http.receive, send)
        if kind is Exception:  # one that nobody expects is for the log
            raise error


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
