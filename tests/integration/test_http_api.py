"""The HTTP API of the real server where only the real server will do: sockets, signals, the native engine."""

import contextlib
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tests.integration.processes import Starter, wait_until
from tests.integration.servers import wait_until_healthy
from tests.patience import PATIENCE
from tests.ports import free_port

from tandem.types.openai import CompletionRequest

LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}
TRIES = 20  # a busy machine may have computed everything before it is asked


def start(starter: Starter, model: Path, *options: str) -> tuple[subprocess.Popen[str], httpx.Client]:
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    process = starter.start(
        "inference",
        *("--model.name", str(model), "--port", str(port), "--seq-len", "512", "--threads", "1"),
        *("--server.weight-roots", str(model.parents[1]), *options),
    )
    wait_until_healthy(process, base_url)
    return process, httpx.Client(base_url=base_url, timeout=60 * PATIENCE, trust_env=False)


@pytest.fixture(scope="module")
def client(tiny_model: Path) -> Iterator[httpx.Client]:
    starter = Starter()
    try:
        options = ("--max-sequences", "4", "--max-waiting", "6", "--server.max-body-mb", "1", "--check-invariants")
        _, client = start(starter, tiny_model, *options)
        with client:
            yield client
    finally:
        starter.end_all()


def numbers(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}


def is_idle(client: httpx.Client) -> bool:
    found = numbers(client)
    names = ("tandem_sequences_running", "tandem_sequences_waiting", "tandem_cache_usage_ratio")
    return all(found[name] == 0 for name in names)


def streamed(client: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        events = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


@pytest.mark.parametrize("options", [{}, {"stop": ["a", "th"]}, {"logprobs": 2}, {"n": 3, "min_tokens": 5}])
def test_a_stream_tells_what_the_whole_answer_says(client: httpx.Client, options: dict[str, Any]) -> None:
    body = {"prompt": "hello", "max_tokens": 40, "seed": 7, "return_token_ids": True, **options}
    whole = client.post("/v1/completions", json=body).json()["choices"]
    parts = [choice for chunk in streamed(client, "/v1/completions", body) for choice in chunk["choices"]]
    for choice in whole:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert "".join(part["text"] for part in own) == choice["text"]
        assert [token for part in own for token in part["token_ids"]] == choice["token_ids"]
        assert [v for part in own for v in part["weight_versions"]] == choice["weight_versions"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] and own[-1]["stop_reason"] == choice["stop_reason"]
        if "logprobs" in options:
            told = [value for part in own for value in part["logprobs"]["token_logprobs"]]
            assert told == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)


def test_tokens_arrive_while_others_are_still_computed(client: httpx.Client) -> None:
    for _ in range(TRIES):
        with client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            num_running = numbers(client)["tandem_sequences_running"]
        wait_until(lambda: is_idle(client), 10, "the stream that was left to be forgotten")
        if num_running == 1:
            return
    pytest.fail("all tokens were computed when the first one came")


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_free_their_places(client: httpx.Client, stream: bool) -> None:
    """Running and waiting ones: four of five sequences run."""
    for _ in range(TRIES):
        before = numbers(client)["tandem_generated_tokens_total"]
        leave_early(client, LONG | {"n": 5, "stream": stream})
        wait_until(lambda: is_idle(client), 10, "what was asked for to be forgotten")
        if numbers(client)["tandem_generated_tokens_total"] - before < 5 * 400:
            return
    pytest.fail("what nobody waits for is computed to its end")


def leave_early(client: httpx.Client, body: dict[str, Any]) -> None:
    """Or at the end, where a busy machine finds the whole answer before it finds that it is late."""
    with contextlib.suppress(httpx.ReadTimeout):
        if not body["stream"]:
            client.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.2))
            return
        with client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_lines())


def test_a_full_queue(client: httpx.Client) -> None:
    client.post("/pause")
    try:
        with ThreadPoolExecutor() as pool:
            running = pool.submit(client.post, "/v1/completions", json={"prompt": "a", "max_tokens": 2, "n": 10})
            wait_until(lambda: numbers(client)["tandem_sequences_waiting"] == 10, 10, "the first request to wait")
            refused = client.post("/v1/completions", json={"prompt": "a"})
            assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
            client.post("/resume")
            assert running.result(timeout=30 * PATIENCE).status_code == 200
    finally:
        client.post("/resume")
    assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(client: httpx.Client, chunked: bool) -> None:
    piece = b" " * 65536
    pieces = (piece for _ in range(40))
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", content=pieces if chunked else piece * 40, headers=headers)
    assert answer.status_code == 413 and "1 MiB" in answer.json()["error"]["message"]


def test_half_a_request_holds_nothing(client: httpx.Client) -> None:
    address = (client.base_url.host, client.base_url.port)
    with socket.create_connection(address) as connection:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        connection.sendall(head + b'{"prompt": ')
        assert client.get("/health").status_code == 200
    wait_until(lambda: numbers(client)["tandem_http_requests_open"] == 1, 10, "the request to be given up")


SMALL = {"prompt": "abc", "max_tokens": 2}
NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.integers(-3, 40)
VALUES = NUMBERS | st.booleans() | st.none() | st.text(max_size=5) | st.lists(NUMBERS, max_size=3)
FIELDS = st.dictionaries(st.sampled_from(sorted(CompletionRequest.model_fields)), VALUES, max_size=4)


@settings(max_examples=150)
@given(fields=FIELDS)
def test_no_value_harms_the_engine(client: httpx.Client, fields: dict[str, Any]) -> None:
    content = json.dumps(SMALL | fields).encode()
    answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (200, 400, 404), (fields, answer.text)
    assert client.get("/health").status_code == 200, fields


def test_sigterm_lets_streams_finish(starter: Starter, tiny_model: Path) -> None:
    process, client = start(starter, tiny_model, "--drain-timeout-s", "30")
    with client, client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
    output, _ = process.communicate(timeout=20 * PATIENCE)
    assert process.returncode == 0 and "ERROR" not in output, output


def test_sigterm_does_not_wait_for_ever_for_streams(starter: Starter, tiny_model: Path) -> None:
    process, client = start(starter, tiny_model, "--drain-timeout-s", "0.2")
    with client, client.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        next(lines)
        client.post("/pause")
        process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert process.wait(timeout=20 * PATIENCE) == 0


def write_adapter(folder: Path, scale: float) -> Path:
    """In PEFT's format, for the first layer of the tiny model."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["down_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    prefix = "base_model.model.model.layers.0.mlp.down_proj"
    tensors = {
        f"{prefix}.lora_A.weight": torch.randn(2, 256, generator=generator) * scale,
        f"{prefix}.lora_B.weight": torch.randn(128, 2, generator=generator) * scale,
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_adapters_are_loaded_chosen_and_unloaded(client: httpx.Client, tmp_path: Path) -> None:
    paths = {name: write_adapter(tmp_path / name, scale) for name, scale in (("mild", 0.5), ("wild", 3.0))}
    for name, path in paths.items():
        body = {"lora_name": name, "lora_path": str(path), "version": 7}
        loaded = client.post("/v1/load_lora_adapter", json=body)
        assert loaded.status_code == 200, loaded.text
    assert [entry["id"] for entry in client.get("/v1/models").json()["data"]][1:] == ["mild", "wild"]
    ask = {"prompt": "hello", "max_tokens": 8, "temperature": 0, "logprobs": 0, "return_token_ids": True}
    answers = {name: client.post("/v1/completions", json=ask | {"model": name}).json() for name in paths}
    answers["base"] = client.post("/v1/completions", json=ask).json()
    told = {name: answer["choices"][0]["logprobs"]["token_logprobs"] for name, answer in answers.items()}
    assert told["mild"] != told["base"] != told["wild"] != told["mild"]
    assert answers["mild"]["choices"][0]["weight_versions"] == [7] * 8
    assert answers["base"]["choices"][0]["weight_versions"] == [0] * 8
    for name in paths:
        assert client.post("/unload_lora_adapter", json={"lora_name": name}).status_code == 200
    assert client.post("/v1/completions", json=ask | {"model": "mild"}).status_code == 404
    broken = client.post("/load_lora_adapter", json={"lora_name": "x", "lora_path": str(tmp_path)})
    assert broken.status_code == 400 and broken.json()["error"]["code"] == "adapter_refused"


def test_prompt_tokens_that_were_cached_are_counted(client: httpx.Client) -> None:
    client.post("/reset_prefix_cache")
    body = {"prompt": "a text that is long enough to fill a block or two", "max_tokens": 1}
    cached = [client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert cached[0] == {"cached_tokens": 0} and cached[1]["cached_tokens"] >= 16


def test_log_probs_at_the_sampling_temperature_or_raw(client: httpx.Client) -> None:
    body = {"prompt": "hello", "max_tokens": 6, "temperature": 2.0, "seed": 3, "logprobs": 0}
    sampling, raw = (
        client.post("/v1/completions", json=body | {"logprobs_mode": mode}).json()["choices"][0]
        for mode in ("sampling", "raw")
    )
    assert sampling["text"] == raw["text"]
    assert sampling["logprobs"]["token_logprobs"] != pytest.approx(raw["logprobs"]["token_logprobs"], abs=1e-3)
