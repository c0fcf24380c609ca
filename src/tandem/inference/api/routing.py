"""Routes that refuse query parameters they do not know, as bodies refuse fields."""

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from tandem.inference.api.errors import BadRequest


class ExactRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()
        known = {field.alias for field in self.dependant.query_params}

        async def checked(request: Request) -> Response:
            if request.scope["query_string"]:
                unknown = sorted(set(request.query_params) - known)
                if unknown:
                    raise BadRequest(f"unknown query parameter {unknown[0]!r}", unknown[0])
            return await answer(request)

        return checked


def exact_router() -> APIRouter:
    return APIRouter(route_class=ExactRoute)
