"""Who may pass: nobody without the key, but for /health, exactly that path."""

import asyncio
from typing import Any

import pytest

from tandem.utils.serving.auth import RequireApiKey

KEY = "correct-horse"


def ask(path: str, authorization: str | None) -> int:
    """The status of the answer; 200 is the app's behind the middleware."""
    statuses: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    headers = [] if authorization is None else [(b"authorization", authorization.encode())]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b""}
    asyncio.run(RequireApiKey(app, KEY)(scope, receive, send))
    return statuses[0]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_the_key_opens_every_route(scheme: str) -> None:
    assert ask("/update_weights", f"{scheme} {KEY}") == 200


@pytest.mark.parametrize(
    "authorization", [None, "", KEY, f"Basic {KEY}", "Bearer", "Bearer ", "Bearer correct-hors", f"Bearer {KEY}r"]
)
def test_anything_else_does_not(authorization: str | None) -> None:
    assert ask("/v1/models", authorization) == 401


@pytest.mark.parametrize("path", ["/healthX", "/health/", "/health/../update_weights", "/", "/v1/health"])
def test_only_health_itself_is_open(path: str) -> None:
    assert ask("/health", None) == 200
    assert ask(path, None) == 401
