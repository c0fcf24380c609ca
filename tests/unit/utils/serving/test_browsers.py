"""What a web page may ask of a server without a key: nothing."""

from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from tests.unit.serving.http.conftest import hello_engine, write_tokenizer

from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions
from tandem.utils.serving.browsers import names_of

PORT = 8000
POSTS = ("/v1/completions", "/pause", "/resume", "/update_weights", "/load_lora_adapter", "/tokenize", "/nowhere")


@pytest.fixture(scope="module")
def make_client(tmp_path_factory: pytest.TempPathFactory) -> Any:
    tokenizer = write_tokenizer(tmp_path_factory.mktemp("tokenizer"))

    def make(**options: Any) -> TestClient:
        given: Any = {"host_names": names_of("127.0.0.1", ["Inference.example"])} | options
        app = create_app(hello_engine(tokenizer), tokenizer, Path("/models/little"), ApiOptions(99, 512, **given))
        return TestClient(app, base_url=f"http://127.0.0.1:{PORT}")

    return make


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:9999", "http://localhost:8000", "file://", ""]
)
def test_pages_of_others_are_refused(make_client: Any, origin: str) -> None:
    client = make_client()
    for path in POSTS:
        answer = client.post(path, json={"prompt": "a"}, headers={"Origin": origin})
        assert answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_origin", path
        assert client.post(path, headers={"Origin": origin}).status_code == 403, path
    assert client.get("/v1/models", headers={"Origin": origin}).status_code == 403
    assert client.get("/health", headers={"Origin": origin}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "a@127.0.0.1", "["],
)
def test_names_of_others_are_refused(make_client: Any, host: str) -> None:
    client = make_client()
    for path in POSTS:
        answer = client.post(path, json={"prompt": "a"}, headers={"Host": host})
        assert answer.status_code == 403 and "--server.allowed-hosts" in answer.json()["error"]["message"], path
    assert client.get("/v1/models", headers={"Host": host}).status_code == 403


@pytest.mark.parametrize(
    "host", ["127.0.0.1:8000", "LOCALHOST:8000", "localhost", "[::1]:8000", "10.1.2.3:8000", "inference.example:80"]
)
def test_its_own_names_and_addresses_pass(make_client: Any, host: str) -> None:
    client = make_client()
    body = {"prompt": "a"}
    assert client.post("/v1/completions", json=body, headers={"Host": host}).status_code == 200
    same = {"Host": host, "Origin": f"http://{host}"}
    assert client.post("/v1/completions", json=body, headers=same).status_code == 200


def test_a_server_with_a_key_asks_for_nothing_but_the_key(make_client: Any) -> None:
    client = make_client(host_names=None, api_key="secret")
    headers = {"Host": "gateway.example", "Origin": "https://ui.example"}
    assert client.post("/v1/completions", json={"prompt": "a"}, headers=headers).status_code == 401
    for scheme in ("Bearer", "bearer", "BEARER"):
        answer = client.post(
            "/v1/completions", json={"prompt": "a"}, headers=headers | {"Authorization": f"{scheme} secret"}
        )
        assert answer.status_code == 200


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "text/plain;application/json"],
)
def test_a_body_must_say_that_it_is_json(make_client: Any, kind: str | None) -> None:
    client = make_client()
    headers = {} if kind is None else {"Content-Type": kind}
    for path in ("/v1/completions", "/pause", "/resume", "/update_weights"):
        for content in (b'{"mode": "keep"}', iter([b"{}"])):
            answer = client.post(path, content=content, headers=headers)
            assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"], path


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8", "application/problem+json"])
def test_json_by_any_of_its_names(make_client: Any, kind: str) -> None:
    client = make_client()
    assert client.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind}).status_code == 200
    assert client.post("/resume").status_code == 200  # no body, no type
