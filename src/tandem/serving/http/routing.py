"""From a request to a route's function, the same way for all: the query is checked, the body read and validated, the
answer sent. An endpoint says all there is to know of a route; openapi.py publishes it.
"""

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tandem.serving.http.errors import BadRequest, ClientGone, InvalidRequest

Handler = Callable[..., Coroutine[Any, Any, Response]]
# What a route may answer besides what all do.
TOO_MUCH = {429: "Too many requests wait; come back after Retry-After seconds."}
NOT_SERVED = {404: "The model is not served here."}
NO_ADAPTER = {404: "The adapter is not loaded."}
BUSY = {409: "The engine is busy with something that contradicts this, or another run holds the server."}
NO_BODY = {"type": "missing", "loc": ("body",), "msg": "Field required"}


class NoQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")


class AnyQuery(BaseModel):
    """Parameters are not looked at."""


class Endpoint(Route):
    """One method of one path. `handler` takes the request, and before it the body, where there is one."""

    def __init__(
        self,
        method: str,
        path: str,
        handler: Handler,
        answer: type[BaseModel] | None,
        *,
        body: type[BaseModel] | None = None,
        needs_body: bool = True,
        query: type[BaseModel] = NoQuery,
        statuses: Mapping[int, str] | None = None,
        failure: type[BaseModel] | None = None,
        may_stream: bool = False,
        is_listed: bool = True,
    ) -> None:
        """`answer`: its shape as JSON; None is plain text. `statuses`: besides those that all endpoints have.
        `failure`: the shape of status 503, where that is no error in OpenAI's shape."""
        super().__init__(path, handler, include_in_schema=is_listed)
        self.app = self._serve
        self.methods = {method}
        self.method = method
        self.handler = handler
        self.answer = answer
        self.body = body
        self.needs_body = needs_body
        self.query = query
        self.statuses = dict(statuses or {})
        self.failure = failure
        self.may_stream = may_stream

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        if scope["query_string"]:
            self._check_query(http)
        if self.body is None:
            response = await self.handler(http)
        else:
            response = await self.handler(self._validated(self.body, await read_body(receive)), http)
        await response(scope, receive, send)

    def _check_query(self, http: Request) -> None:
        unknown = sorted(set(http.query_params) - set(self.query.model_fields))
        if unknown and self.query.model_config.get("extra") == "forbid":
            raise BadRequest(f"unknown query parameter {unknown[0]!r}", unknown[0])
        validated(self.query, dict(http.query_params), "query")

    def _validated(self, model: type[BaseModel], content: bytes) -> BaseModel | None:
        if not content and self.needs_body:
            raise InvalidRequest([NO_BODY], None)
        data = parse_json(content) if content else None
        return validated(model, data, "body") if self.needs_body or data is not None else None


def validated(model: type[BaseModel], data: Any, source: str) -> BaseModel:
    try:
        return model.model_validate(data, from_attributes=True)  # so that no error names a class of ours
    except ValidationError as error:
        raise InvalidRequest([{**each, "loc": (source, *each["loc"])} for each in error.errors()], data) from error


async def read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_json(content: bytes) -> Any:
    """By pydantic's parser, which is fast. What it refuses goes to json's, which reads UTF-16 and half characters too,
    and says what is wrong."""
    try:
        return from_json(content)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(content)
    except json.JSONDecodeError as error:
        place = ("body", error.pos)
        invalid = {"type": "json_invalid", "loc": place, "msg": "JSON decode error", "ctx": {"error": error.msg}}
        raise InvalidRequest([invalid], error.doc) from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "There was an error parsing the body") from error
