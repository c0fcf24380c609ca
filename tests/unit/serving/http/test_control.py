"""Pausing, weights, adapters, tokens and numbers."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient
from tests.unit.serving.http.conftest import hello_engine
from tests.unit.serving.http.fake_engine import FakeEngine
from tests.unit.serving.http.test_chat import WEATHER

from tandem.data.tokenizer import Tokenizer
from tandem.engine.protocol import EngineBusy, EngineStats
from tandem.serving.http.app import create_app
from tandem.serving.http.context import ApiOptions
from tandem.types.identity import ServerIdentity


def test_pause_in_all_its_modes(client: TestClient, engine: FakeEngine) -> None:
    for answer in (
        client.post("/pause"),
        client.post("/pause?mode=wait"),
        client.post("/pause", json={"mode": "abort"}),
    ):
        assert answer.json() == {"status": "paused", "paused": True}
    assert engine.calls == [("pause", "keep"), ("pause", "wait"), ("pause", "abort")]
    assert client.get("/is_paused").json() == {"is_paused": True}
    client.post("/pause?clear_cache=true")
    assert engine.calls[-1] == ("reset_prefix_cache",)
    assert client.post("/resume").json() == {"status": "resumed", "paused": False}
    for wrong in ("/pause?mode=nap", "/pause?speed=1"):
        assert client.post(wrong).status_code == 400
    for query, body, param in (
        ("mode=keep", {"mode": "wait"}, "mode"),
        ("clear_cache=false", {"clear_cache": True}, "clear_cache"),
    ):
        both = client.post(f"/pause?{query}", json=body)
        assert both.status_code == 400 and both.json()["error"]["param"] == param


def test_weights_are_swapped_or_refused(client: TestClient, engine: FakeEngine, tmp_path: Path) -> None:
    assert client.post("/update_weights", json={"path": str(tmp_path), "version": 4, "mode": "wait"}).json() == {
        "version": 4
    }
    assert engine.calls == [("update_weights", tmp_path, 4, "wait")]
    asked = {"path": str(tmp_path / "to come"), "version": 9, "check_only": True}
    assert client.post("/update_weights", json=asked).json() == {"version": 4} and len(engine.calls) == 1
    missing = client.post("/update_weights", json={"path": str(tmp_path / "none"), "version": 5})
    assert missing.status_code == 400 and missing.json()["error"]["code"] == "weights_refused"
    assert client.get("/health").json()["version"] == 4


def test_a_busy_engine_is_a_conflict(client: TestClient, engine: FakeEngine, tmp_path: Path) -> None:
    def busy(*arguments: object) -> None:
        raise EngineBusy("the engine is paused")

    engine.update_weights = busy  # type: ignore[method-assign]
    answer = client.post("/update_weights", json={"path": str(tmp_path), "version": 4, "mode": "wait"})
    assert answer.status_code == 409 and answer.json()["error"]["message"] == "the engine is paused"


def test_a_version_that_no_engine_can_keep_is_refused(client: TestClient, engine: FakeEngine, tmp_path: Path) -> None:
    adapter = {"lora_name": "brave", "lora_path": str(tmp_path), "version": 2**63}
    for path, body in (
        ("/load_lora_adapter", adapter),
        ("/update_weights", {"path": str(tmp_path), "version": 2**63}),
    ):
        refused = client.post(path, json=body)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "version"
    assert engine.calls == []
    assert client.post("/load_lora_adapter", json=adapter | {"version": 2**63 - 1}).status_code == 200


def test_adapters_come_and_go(client: TestClient, engine: FakeEngine, tmp_path: Path) -> None:
    body = {"lora_name": "brave", "lora_path": str(tmp_path)}
    assert client.post("/v1/load_lora_adapter", json=body | {"version": 2}).json() == body
    again = client.post("/load_lora_adapter", json=body)
    assert again.status_code == 400 and again.json()["error"]["param"] == "lora_name"
    assert client.post("/load_lora_adapter", json=body | {"load_inplace": True, "mode": "wait"}).status_code == 200
    assert engine.calls == [("load_adapter", "brave", 2, False, "keep"), ("load_adapter", "brave", None, True, "wait")]
    assert client.post("/load_lora_adapter", json=body | {"mode": "abort"}).json()["error"]["param"] == "mode"
    own = client.post("/load_lora_adapter", json=body | {"lora_name": "little"})
    assert own.status_code == 400 and own.json()["error"]["param"] == "lora_name"
    missing = client.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": str(tmp_path / "none")})
    assert missing.status_code == 400 and missing.json()["error"]["param"] == "lora_path"
    assert client.post("/unload_lora_adapter", json={"lora_name": "brave"}).status_code == 200
    for path in ("/unload_lora_adapter", "/v1/unload_lora_adapter"):
        gone = client.post(path, json={"lora_name": "brave"})
        assert gone.status_code == 404 and gone.json()["error"]["param"] == "lora_name"


def test_the_prefix_cache_is_reset(client: TestClient, engine: FakeEngine) -> None:
    assert client.post("/reset_prefix_cache").json() == {"success": True}
    assert engine.calls == [("reset_prefix_cache",)]


def test_text_to_tokens_and_back(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"prompt": "ab", "return_token_strs": True}).json()
    assert answer == {"count": 2, "max_model_len": 512, "tokens": [66, 67], "token_strs": ["a", "b"]}
    assert client.post("/detokenize", json={"tokens": [66, 0, 67]}).json() == {"prompt": "a<eos>b"}
    messages = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    tokens = client.post("/tokenize", json=messages).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": tokens}).json() == {"prompt": "user:hi|"}
    assert client.post("/tokenize", json=messages | {"tools": [WEATHER]}).json()["count"] > len(tokens)
    for body in ({}, {"prompt": "a", **messages}, {"tokens": [1]}):
        assert client.post("/tokenize", json=body).status_code == 400
    outside = client.post("/detokenize", json={"tokens": [9999]})
    assert outside.status_code == 400 and outside.json()["error"]["param"] == "tokens"
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "<eos>" and "messages" in info["chat_template"]


def test_metrics_in_prometheus_format(client: TestClient, engine: FakeEngine) -> None:
    engine.stats = EngineStats(2, 3, 0.5, 10, 4, 20, 1, {"stop": 5, "length": 6})
    client.post("/v1/completions", json={"prompt": "abc", "stream": True})
    client.post("/v1/completions", json={"prompt": 3})
    client.get("/nowhere")
    answer = client.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(answer.text))
    values = {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}
    requests, seconds = "tandem_http_requests_total", "tandem_http_request_seconds"
    assert values[requests, "POST", "/v1/completions", "200"] == 1
    assert values[requests, "POST", "/v1/completions", "400"] == 1
    assert values[requests, "any", "none", "404"] == 1
    assert values[f"{seconds}_count", "/v1/completions"] == 2
    assert values[f"{seconds}_bucket", "+Inf", "/v1/completions"] == 2
    assert values["tandem_time_to_first_token_seconds_count",] == 1
    assert values["tandem_http_requests_open",] == 1  # this one
    assert values["tandem_sequences_running",] == 2 and values["tandem_sequences_waiting",] == 3
    assert values["tandem_cache_usage_ratio",] == 0.5 and values["tandem_generated_tokens_total",] == 20
    assert values["tandem_samples_finished_total", "stop"] == 5 and values["tandem_weight_version",] == 3
    assert values["process_resident_memory_bytes",] > 1 << 20
    kinds = {family.name: family.type for family in families}
    assert kinds["tandem_preemptions"] == "counter" and kinds["tandem_paused"] == "gauge"
    assert kinds[seconds] == "histogram"


def test_servers_in_one_process_count_for_themselves(
    client: TestClient, tokenizer: Tokenizer, api_options: ApiOptions
) -> None:
    client.get("/version")
    app = create_app(hello_engine(tokenizer), tokenizer, Path("/models/other"), api_options)
    with TestClient(app) as other:
        assert 'route="/version"' not in other.get("/metrics").text
    assert 'route="/version"' in client.get("/metrics").text


def test_health_tells_of_a_failure(client: TestClient, engine: FakeEngine) -> None:
    assert client.get("/health").json()["status"] == "ok"
    engine.failure = "out of luck"
    assert client.get("/health").status_code == 503 and client.get("/health").json()["reason"] == "out of luck"
    assert client.get("/version").json()["version"]


def test_every_answer_says_who_gave_it(client: TestClient, engine: FakeEngine, tmp_path: Path) -> None:
    answers = [
        client.get("/health"),
        client.get("/nowhere"),
        client.post("/v1/completions", json={"prompt": "abc"}),
        client.post("/v1/completions", json={"prompt": "abc", "stream": True}),
        client.post("/v1/completions", json={"prompt": 3}),
        client.post("/update_weights", json={"path": str(tmp_path / "none"), "version": 5, "run": "one"}),
    ]
    engine.submit = None  # type: ignore[assignment]  # a fault of ours
    answers.append(client.post("/v1/completions", json={"prompt": "abc"}))
    assert [answer.status_code for answer in answers] == [200, 404, 200, 200, 400, 400, 500]
    health = client.get("/health").json()
    expected = ServerIdentity(health["instance"], "/models/little", 3, ("-",))
    assert [ServerIdentity.from_headers(answer.headers) for answer in answers] == [expected] * 7
    assert health["run"] is None


def test_runs_name_themselves_and_are_named(client: TestClient, tmp_path: Path) -> None:
    body = {"path": str(tmp_path), "version": 4}
    assert client.post("/update_weights", json=body | {"run": "one"}).headers["x-tandem-run"] == "-, one"
    assert client.post("/v1/completions", json={"prompt": "abc"}).headers["x-tandem-run"] == "one"
    adapter = {"lora_name": "brave", "lora_path": str(tmp_path)}
    assert client.post("/load_lora_adapter", json=adapter).headers["x-tandem-run"] == "one"  # nobody's tokens change
    assert client.post("/load_lora_adapter", json=adapter | {"lora_name": "b", "run": "two"}).status_code == 200
    assert client.get("/health").json()["run"] == "two"
    displaced = client.post("/update_weights", json=body | {"run": "one"})
    assert displaced.status_code == 409 and "replaced by run 'two'" in displaced.json()["error"]["message"]
    for wrong in ("", "-", "a, b", "a\nb"):
        refused = client.post("/update_weights", json=body | {"run": wrong})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "run"


def test_weights_are_for_the_run_that_holds_the_server(client: TestClient, engine: FakeEngine, tmp_path: Path) -> None:
    mine = {"run": "mine-1", "lease": "0123456789abcdef"}
    assert client.post("/claim", json=mine | {"place": "/runs/mine on gpu7"}).json() == {"run": "mine-1"}
    weights = {"path": str(tmp_path), "version": 1}
    assert client.post("/update_weights", json=weights | {"run": "mine-1"}).status_code == 200
    for route, body in (
        ("/update_weights", weights),
        ("/update_weights", weights | {"run": "theirs-1"}),
        ("/load_lora_adapter", {"lora_name": "policy", "lora_path": str(tmp_path), "run": "theirs-1"}),
    ):
        answer = client.post(route, json=body)
        assert answer.status_code == 409 and "run 'mine-1' (/runs/mine on gpu7)" in answer.json()["error"]["message"]
    assert len(engine.calls) == 1
    assert client.post("/release", json={"lease": mine["lease"]}).json() == {"released": True}
    assert client.post("/update_weights", json=weights | {"run": "theirs-1"}).status_code == 200
