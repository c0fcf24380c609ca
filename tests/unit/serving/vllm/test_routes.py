"""The routes in front of vLLM that change what it does, around an engine that writes down what it is asked."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tests.unit.serving.vllm.test_backend import FakeEngine, FakeRegistry

from tandem.serving.vllm.middleware import Routes
from tandem.serving.vllm.settings import Settings


class ServedEngine(FakeEngine):
    """With what else our middleware looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.engine_core = SimpleNamespace(outputs_queue=asyncio.Queue())
        self.input_processor = SimpleNamespace(process_inputs=None)
        model_config = SimpleNamespace(get_vocab_size=lambda: 102)
        self.vllm_config = SimpleNamespace(lora_config=None, model_config=model_config)


@pytest.fixture
def engine() -> ServedEngine:
    return ServedEngine()


@pytest.fixture
def client(engine: ServedEngine, tiny_model: Path) -> Iterator[TestClient]:
    settings = Settings(tiny_model, "tiny", None, 1 << 20, 60.0, (tiny_model.parent,), frozenset())
    app = Starlette()
    app.state.engine_client, app.state.openai_serving_models = engine, FakeRegistry()
    app.add_middleware(Routes, settings=settings)
    with TestClient(app) as client:
        yield client


def test_pausing_and_resuming_show(client: TestClient, engine: ServedEngine) -> None:
    assert client.get("/is_paused").json() == {"is_paused": False}
    assert client.post("/pause").json() == {"status": "paused", "paused": True}
    assert client.get("/is_paused").json() == {"is_paused": True}
    assert client.get("/health").json()["paused"] is True
    assert client.post("/resume").json() == {"status": "resumed", "paused": False}
    assert engine.calls == ["pause keep", "resume"]


def test_the_cache_is_emptied_on_request(client: TestClient, engine: ServedEngine) -> None:
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    assert engine.calls == ["reset"]
    engine.cache_resets = False
    assert client.post("/reset_prefix_cache").status_code == 503


def test_a_paused_engine_cannot_end_what_runs(client: TestClient, tiny_model: Path) -> None:
    client.post("/pause")
    for route, body in (
        ("/pause", {"mode": "wait"}),
        ("/update_weights", {"path": str(tiny_model), "version": 0, "mode": "wait"}),
    ):
        answer = client.post(route, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "engine_busy"), answer.text


def test_other_weights_of_the_same_model_are_served(client: TestClient, engine: ServedEngine, tiny_model: Path) -> None:
    answer = client.post("/update_weights", json={"path": str(tiny_model), "version": 0, "run": "mine"})
    assert answer.json() == {"version": 0}
    assert [call.split()[0] for call in engine.calls] == ["check_weights", "pause", "reload_weights", "reset", "resume"]
    assert client.get("/health").json()["run"] == "mine"


def test_a_wrong_body_is_explained_as_by_our_own_routes(client: TestClient, engine: ServedEngine) -> None:
    for body, message, param in (
        ({"path": "x"}, "field 'version' is missing", "version"),
        ({"path": "x", "version": 1, "more": 1}, "unknown field 'more'", "more"),
        (["x"], "the body must be a JSON object, sent with the header 'Content-Type: application/json'", None),
    ):
        answer = client.post("/update_weights", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["message"], error["param"]) == (400, message, param)
    assert engine.calls == []


def test_weights_are_for_the_run_that_holds_the_server(
    client: TestClient, engine: ServedEngine, tiny_model: Path
) -> None:
    assert client.post("/claim", json={"run": "mine-1", "lease": "0123456789abcdef"}).json() == {"run": "mine-1"}
    weights = {"path": str(tiny_model), "version": 0, "run": "theirs-1"}
    refused = client.post("/update_weights", json=weights)
    assert refused.status_code == 409 and "run 'mine-1' uses this server" in refused.json()["error"]["message"]
    assert engine.calls == []
    assert client.post("/claim", json={"run": "mine-1"}).json()["error"]["param"] == "lease"
    assert client.post("/release", json={"lease": "0123456789abcdef"}).json() == {"released": True}
    assert client.post("/update_weights", json=weights).status_code == 200
