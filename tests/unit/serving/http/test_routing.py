"""One way for every request: from its query and its body to an answer, or to what is wrong with it."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.unit.serving.http.fake_engine import FakeEngine

from tandem.serving.http import routing

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


def ask(client: TestClient, route: str, content: bytes) -> tuple[int, dict[str, Any]]:
    answer = client.post(route, content=content, headers=JSON)
    return answer.status_code, {key: value for key, value in answer.json().items() if key not in ("id", "created")}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_both_parsers_lead_to_the_same_answers(client: TestClient, route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pydantic's, and json's, which reads what pydantic's refuses."""
    asked = [*contents([*GOOD, CHAT, *BAD]), *ODD]
    found = [ask(client, route, content) for content in asked]
    monkeypatch.setattr(routing, "from_json", json.loads)
    assert [ask(client, route, content) for content in asked] == found
    assert {status for status, _ in found} == {200, 400}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the body must be a JSON object, sent with the header 'Content-Type: application/json'"),
        (b"null", "the body must be a JSON object, sent with the header 'Content-Type: application/json'"),
        (b"[]", "the body must be a JSON object, sent with the header 'Content-Type: application/json'"),
        (b"{", "the body is not JSON: Expecting property name enclosed in double quotes"),
        (b"{} x", "the body is not JSON: Extra data"),
        (b"\xff", "There was an error parsing the body"),
        (b"[" * 10**6, "There was an error parsing the body"),
        (b'{"max_tokens": %s}' % (b"9" * 5000), "There was an error parsing the body"),
    ],
)
@pytest.mark.parametrize("route", ["/v1/completions", "/tokenize", "/claim", "/update_weights"])
def test_a_body_that_cannot_be_read_is_told_why(client: TestClient, route: str, content: bytes, message: str) -> None:
    status, answer = ask(client, route, content)
    assert status == 400
    assert answer["error"] == {"message": message, "type": "invalid_request_error", "param": None, "code": None}


def test_bodies_in_utf_16_and_with_half_characters_are_read(client: TestClient) -> None:
    assert ask(client, "/v1/completions", json.dumps(GOOD[0]).encode("utf-16"))[0] == 200
    assert ask(client, "/v1/completions", b'{"prompt": "hi", "user": "\\ud800"}')[0] == 200


def test_a_parameter_that_is_not_known_and_a_method_that_is_not_served_are_refused(client: TestClient) -> None:
    answer = client.post("/v1/completions?color=red", json=GOOD[0])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "color"
    answer = client.get("/v1/completions")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert client.head("/version").status_code == 405  # HEAD is for /health


def test_a_body_that_may_be_left_out_may_be_null(client: TestClient) -> None:
    for content in (b"", b"null", b"{}"):
        assert ask(client, "/pause", content) == (200, {"status": "paused", "paused": True})
    assert ask(client, "/pause", b"3")[0] == 400


def test_requests_are_counted_by_their_route(client: TestClient) -> None:
    ask(client, "/v1/completions", contents(GOOD)[0])
    wanted = 'tandem_http_requests_total{method="POST",route="/v1/completions",status="200"} 1.0'
    assert wanted in client.get("/metrics").text


def test_what_the_engine_cannot_do_is_answered(client: TestClient, engine: FakeEngine) -> None:
    engine.error_after = 0
    status, answer = ask(client, "/v1/completions", contents(GOOD)[0])
    assert status == 503 and answer["error"]["code"] == "engine_failed"


def test_an_error_that_nobody_expects_is_answered_too(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.serving.http.generation.asked_structure", lambda body: 1 / 0)
    status, answer = ask(client, "/v1/completions", contents(GOOD)[0])
    assert status == 500 and "ZeroDivisionError" in answer["error"]["message"]
