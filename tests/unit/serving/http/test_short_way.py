"""The short way answers as FastAPI's does, and is taken where it can be."""

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.responses import Response
from tests.unit.serving.http.fake_engine import FakeEngine

from tandem.serving.http.short_way import ShortWay

JSON = {"Content-Type": "application/json"}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
GOOD = [
    {"prompt": "hi", "max_tokens": 3},
    {"prompt": [3, 4, 5], "max_tokens": 3, "logprobs": 0, "return_token_ids": True, "detokenize": False},
    {"prompt": [[3], [4, 5]], "max_tokens": 2, "n": 2, "seed": 7},
    {"prompt": "hi", "max_tokens": 3, "stop": None, "temperature": 1},
]
BAD = [
    {"prompt": "hi", "max_tokens": "3"},
    {"prompt": "hi", "no_such_field": 1},
    {"prompt": "hi", "no_such_field": None},
    {"prompt": "hi", "temperature": float("nan")},
    {"prompt": "hi", "seed": 10**30},
    {"prompt": "hi", "max_tokens": 10_000},
    {"prompt": "\ud800"},
    {"prompt": [3, 10**6]},
    {"prompt": []},
    {"max_tokens": 3},
    [],
    None,
]


def contents(bodies: list[Any]) -> list[bytes]:
    return [json.dumps(body).encode() for body in bodies]


ODD = [b"", b"{", b'{"prompt": "hi", "prompt": "ho", "max_tokens": 1}', b"[" * 500, "{}".encode("utf-16"), b"\xff"]


def find_short_way(client: TestClient) -> ShortWay:
    """Among the layers of the app."""
    layer: Any = client.app.middleware_stack  # pyright: ignore[reportAttributeAccessIssue, reportFunctionMemberAccess]
    while not isinstance(layer, ShortWay):
        layer = layer.app
    return layer


def ask(client: TestClient, route: str, content: bytes) -> tuple[int, dict[str, Any]]:
    answer = client.post(route, content=content, headers=JSON)
    return answer.status_code, {key: value for key, value in answer.json().items() if key not in ("id", "created")}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_both_ways_give_the_same_answers(client: TestClient, route: str) -> None:
    asked = [*contents([*GOOD, CHAT, *BAD]), *ODD]
    short = [ask(client, route, content) for content in asked]
    find_short_way(client)._routes.clear()
    assert [ask(client, route, content) for content in asked] == short
    assert {status for status, _ in short} == {200, 400}


def test_good_bodies_need_no_route_of_fastapis(client: TestClient) -> None:
    find_short_way(client).app = Response("fastapi", 404)
    assert [ask(client, "/v1/completions", content)[0] for content in contents(GOOD)] == [200] * len(GOOD)
    assert ask(client, "/v1/chat/completions", json.dumps(CHAT).encode())[0] == 200
    assert client.post("/v1/completions", content=b"{", headers=JSON).text == "fastapi"


def test_a_query_or_another_method_goes_the_long_way(client: TestClient) -> None:
    answer = client.post("/v1/completions?color=red", json=GOOD[0])
    assert answer.status_code == 400 and "color" in answer.text
    assert client.get("/v1/completions").status_code == 405


def test_requests_are_counted_by_their_route(client: TestClient) -> None:
    ask(client, "/v1/completions", contents(GOOD)[0])
    wanted = 'tandem_http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0'
    assert wanted in client.get("/metrics").text


def test_what_the_engine_cannot_do_is_answered(client: TestClient, engine: FakeEngine) -> None:
    engine.error_after = 0
    status, answer = ask(client, "/v1/completions", contents(GOOD)[0])
    assert status == 503 and answer["error"]["code"] == "engine_failed"


def test_an_error_that_nobody_expects_is_answered_too(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.serving.http.routes.asked_structure", lambda body: 1 / 0)
    status, answer = ask(client, "/v1/completions", contents(GOOD)[0])
    assert status == 500 and "ZeroDivisionError" in answer["error"]["message"]
