"""Who may ask, how much, and how many at a time."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from tests.unit.serving.http.fake_engine import FakeEngine

from tandem.data.tokenizer import Tokenizer
from tandem.engine.protocol import EngineStats
from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions

MODEL = Path("/models/little")


@contextmanager
def serving(engine: FakeEngine, tokenizer: Tokenizer, options: ApiOptions) -> Iterator[TestClient]:
    with TestClient(create_app(engine, tokenizer, MODEL, options), raise_server_exceptions=False) as client:
        yield client


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(
    engine: FakeEngine, tokenizer: Tokenizer, api_options: ApiOptions, chunked: bool
) -> None:
    body = b'{"prompt": "' + b"a" * (2 << 20) + b'"}'
    pieces = (body[at : at + 65536] for at in range(0, len(body), 65536))
    with serving(engine, tokenizer, replace(api_options, max_body_bytes=1 << 20)) as client:
        headers = {"Content-Type": "application/json"}
        answer = client.post("/v1/completions", content=pieces if chunked else body, headers=headers)
    assert answer.status_code == 413
    assert "max_body_mb" in answer.json()["error"]["message"] and "1 MiB" in answer.json()["error"]["message"]


def test_a_length_that_is_a_lie(client: TestClient) -> None:
    answer = client.post("/v1/completions", content=b"{}", headers={"Content-Length": "9" * 5000})
    assert answer.status_code == 413


def test_a_full_queue_refuses_with_a_time_to_come_back(
    engine: FakeEngine, tokenizer: Tokenizer, api_options: ApiOptions
) -> None:
    with serving(engine, tokenizer, replace(api_options, max_waiting=4)) as client:
        engine.stats = EngineStats(num_waiting=4)
        for stream in (False, True):
            answer = client.post("/v1/completions", json={"prompt": "abc", "stream": stream})
            assert answer.status_code == 429 and answer.headers["Retry-After"] == "1"
            assert answer.json()["error"]["code"] == "queue_full"
        engine.stats = EngineStats(num_waiting=3)
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 200


def test_requests_count_before_the_engine_has_seen_them(
    engine: FakeEngine, tokenizer: Tokenizer, api_options: ApiOptions
) -> None:
    engine.go.clear()
    app = create_app(engine, tokenizer, MODEL, replace(api_options, max_waiting=4))
    asyncio.run(fill_the_queue(app, engine))


async def fill_the_queue(app: Any, engine: FakeEngine) -> None:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://little") as client:
        asked = [asyncio.create_task(client.post("/v1/completions", json={"prompt": "a", "n": 2})) for _ in range(2)]
        await asyncio.sleep(0.05)
        late = await client.post("/v1/completions", json={"prompt": "a"})
        assert late.status_code == 429
        engine.go.set()
        assert [(await answer).status_code for answer in asked] == [200, 200]
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Bearer", "Basic secret", "Bearersecret", "Bearer secret "])
def test_every_route_but_health_asks_for_the_key(
    engine: FakeEngine, tokenizer: Tokenizer, api_options: ApiOptions, header: str | None
) -> None:
    app = create_app(engine, tokenizer, MODEL, replace(api_options, api_key="secret"))
    with TestClient(app) as client:
        documented = client.get("/openapi.json", headers={"Authorization": "Bearer secret"}).json()["paths"]
        extra = {"/docs": "get", "/openapi.json": "get", "/nowhere": "get", "/v1/load_lora_adapter": "post"}
        routes = [(path, method) for path, operations in documented.items() for method in operations]
        assert len(routes) > 15
        for path, method in [*routes, *extra.items()]:
            answer = client.request(method, path, headers={"Authorization": header} if header else {})
            if path == "/health":
                assert answer.status_code == 200
                continue
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        assert client.get("/version", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_client_that_goes_away_is_forgotten(
    engine: FakeEngine, tokenizer: Tokenizer, api_options: ApiOptions
) -> None:
    """Before the first token and amid them, whole and streamed."""
    app = create_app(engine, tokenizer, MODEL, api_options)
    for begun in (False, True):
        for stream in (False, True):
            engine.step_s = 0.05  # five seconds for all tokens: long enough to leave amid them
            engine.go.set() if begun else engine.go.clear()
            number = len(engine.cancelled)
            body = {"prompt": ["abc", "de"], "max_tokens": 100, "ignore_eos": True, "stream": stream}
            asyncio.run(leave_early(app, body))
            assert len(engine.cancelled) == number + 2 and not engine.open, (begun, stream)


async def leave_early(app: Any, body: dict[str, Any]) -> None:
    """A request whose client closes the connection after a tenth of a second."""
    content = httpx.Request("POST", "http://little/", json=body).content
    messages = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await asyncio.sleep(0.1)
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        pass

    scope = {
        "type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "http_version": "1.1",
        "headers": [(b"content-type", b"application/json")], "scheme": "http", "server": ("little", 80),
        "client": ("127.0.0.1", 1), "root_path": "",
    }  # fmt: skip
    await asyncio.wait_for(app(scope, receive, send), timeout=60)
