"""The real `inference` process over HTTP."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.processes import wait_until
from tests.patience import PATIENCE
from tests.ports import free_port
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from tandem.models.cpu.compiler import Compiler
from tandem.models.hf import named_tensors, new_decoder
from tandem.models.spec import ModelSpec
from tandem.utils.files import write_json
from tandem.utils.manifest import write_manifest
from tandem.weights.files import write_model

KEY = "correct-horse"
AUTH = {"Authorization": f"Bearer {KEY}"}
INFERENCE = str(Path(sys.executable).parent / "inference")
SEQ_LEN = 64
ROUTES = [
    ("GET", "/v1/models"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/pause"),
    ("POST", "/resume"),
    ("POST", "/update_weights"),
    ("GET", "/docs"),
    ("GET", "/redoc"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
    ("GET", "/health/"),
    ("POST", "//health"),
]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
LETTERS = ["<eos>", *"abcdefghijklmnopqrstuvwxyz >"]


def write_tiny_model(folder: Path, seed: int) -> Path:
    folder.mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": len(LETTERS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "dtype": "float32",
    }
    write_model(folder, named_tensors(new_decoder(ModelSpec.from_config(config), seed)), config)
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<eos>", "chat_template": TEMPLATE})
    return folder


def start_server(
    model_dir: Path, *options: str, command: Sequence[str] = (INFERENCE,)
) -> tuple[subprocess.Popen[str], httpx.Client]:
    port = free_port()
    where = ["--model.name", str(model_dir), "--server.port", str(port), "--seq-len", str(SEQ_LEN)]
    where += ["--server.weight-roots", str(model_dir.parents[1])]
    environment = os.environ | {"TANDEM_TEST_KEY": KEY}
    process = subprocess.Popen(
        [*command, *where, "--threads", "1", "--server.api-key-var", "TANDEM_TEST_KEY", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    client = httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=AUTH, timeout=30 * PATIENCE, trust_env=False)
    deadline = time.monotonic() + 60 * PATIENCE
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return process, client
        except httpx.TransportError:
            time.sleep(0.05)
    process.kill()
    raise AssertionError(f"the server did not start: {process.communicate()[0]}")


def number(client: httpx.Client, name: str) -> float:
    """One of the server's metrics."""
    lines = client.get("/metrics").text.splitlines()
    return next(float(value) for known, _, value in (line.rpartition(" ") for line in lines) if known == name)


def end(process: subprocess.Popen[str], client: httpx.Client) -> None:
    client.close()
    if process.poll() is None:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", seed=0)


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[httpx.Client]:
    process, client = start_server(model_dir)
    yield client
    end(process, client)


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_kernels_are_compiled_before_the_server_is_healthy(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler.find()
    if compiler is None:
        pytest.skip("no C compiler")
    quick = tmp_path / "quick"
    quick.write_text(f'#!/bin/sh\nexec {shlex.join(compiler.command)} "$@" -O0\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CC", str(quick))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    process, client = start_server(model_dir, "--device", "cpu")
    end(process, client)
    assert len(list(tmp_path.rglob("kernels-*.so"))) == 1


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("header", [None, b"", b"Bearer", b"Bearer wrong", KEY.encode(), b"Bearer \xff\xfe"])
def test_every_route_but_health_needs_the_key(
    server: httpx.Client, method: str, path: str, header: bytes | None
) -> None:
    with httpx.Client(base_url=server.base_url, trust_env=False) as bare:
        headers = [] if header is None else [(b"Authorization", header)]
        answer = bare.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_health_is_open_and_says_what_is_served(server: httpx.Client, model_dir: Path) -> None:
    answer = httpx.get(f"{server.base_url}/health", trust_env=False)
    health = answer.json()
    assert health.pop("instance") == answer.headers["x-tandem-instance"]
    assert health == {"status": "ok", "version": 0, "model": str(model_dir), "paused": False, "run": None}
    [entry] = server.get("/v1/models").json()["data"]
    assert entry["id"] == str(model_dir)


@pytest.mark.parametrize("prompt", ["abc", ["abc", "de"], [1, 2, 3], [[1, 2, 3], [4, 5]]])
def test_prompts_in_all_forms(server: httpx.Client, prompt: Any) -> None:
    answer = complete(server, prompt=prompt, n=2, max_tokens=4, return_token_ids=True, ignore_eos=True)
    expected = [[1, 2, 3]] * 2 + ([[4, 5]] * 2 if len(prompt) == 2 else [])
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["completion_tokens"] == 4 * len(expected)
    assert answer["usage"]["prompt_tokens"] == (5 if len(prompt) == 2 else 3)


def test_a_completion_has_tokens_logprobs_versions_and_text(server: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 12, "logprobs": 0, "return_token_ids": True, "temperature": 1.5}
    seen = set()
    for seed in range(12):
        [choice] = complete(server, seed=seed, **body)["choices"]
        ids, logprobs = choice["token_ids"], choice["logprobs"]
        stopped = choice["finish_reason"] == "stop"
        seen.add(stopped)
        assert stopped == (ids[-1] == 0) and 0 not in ids[:-1]
        assert choice["text"] == "".join(LETTERS[token] for token in (ids[:-1] if stopped else ids))
        assert logprobs["tokens"] == [LETTERS[token] for token in ids]
        assert len(logprobs["token_logprobs"]) == len(ids) and max(logprobs["token_logprobs"]) < 0
        assert logprobs["text_offset"][:2] == [0, len(LETTERS[ids[0]])][: len(ids)]
        assert choice["weight_versions"] == [0] * len(ids)
        assert complete(server, seed=seed, **body)["choices"] == [choice]
    assert seen == {True, False}, "both ways to finish should have been seen"


def test_defaults_and_extras_are_left_out_unless_asked_for(server: httpx.Client, model_dir: Path) -> None:
    answer = complete(server, prompt="abc", ignore_eos=True, model=model_dir.name, stream=False, user="me", echo=False)
    [choice] = answer["choices"]
    assert set(choice) == {"index", "text", "finish_reason", "stop_reason", "logprobs"} and choice["logprobs"] is None
    assert answer["usage"]["completion_tokens"] == 16


def test_chat_renders_messages_and_answers_in_openai_shape(server: httpx.Client, model_dir: Path) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "kind"}]
    body = {"model": str(model_dir), "messages": messages, "ignore_eos": True, "logprobs": True, "n": 2}
    answer = server.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()
    first, second = answer["choices"]
    assert answer["prompt_token_ids"] == [LETTERS.index(letter) for letter in "bekind>"]
    assert len(first["token_ids"]) == SEQ_LEN - 7  # left out, max_tokens is what fits
    assert first["message"]["role"] == "assistant"
    entry = first["logprobs"]["content"][0]
    assert entry["token"] == LETTERS[first["token_ids"][0]] and entry["bytes"] == list(entry["token"].encode())
    assert first["token_ids"] != second["token_ids"]
    short = server.post("/v1/chat/completions", json=body | {"max_completion_tokens": 3}).json()
    assert short["usage"]["completion_tokens"] == 6


COMPLETION = {"prompt": "abc", "max_tokens": 2}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[1], []]}, "prompt", "empty"),
    ({"prompt": 3}, "prompt", "must be a string"),
    ({"prompt": [1, "a"]}, "prompt", "must be a string"),
    ({"prompt": [1.5]}, "prompt", "must be a string"),
    ({"prompt": [-1]}, "prompt", "must be a string"),
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": [1, len(LETTERS)]}, "prompt", "outside the vocabulary"),
    ({"prompt": [10**30]}, "prompt", "outside the vocabulary"),
    ({"prompt": "a" * 64}, "prompt", "at most 63 fit"),
    ({"prompt": "\ud800"}, "prompt", "not valid Unicode"),
    ({"prompt": ["a", "\ud800"]}, "prompt", "not valid Unicode"),
    ({"user": "\ud800", "stream": 3}, "stream", "boolean"),
    ({"max_tokens": 62}, "max_tokens", "at most 61"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 10**30}, "max_tokens", "at most 61"),
    ({"max_tokens": "3"}, "max_tokens", "integer"),
    ({"max_tokens": 2.5}, "max_tokens", "integer"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 1025}, "n", "1024"),
    ({"n": True}, "n", "integer"),
    ({"prompt": [[1]] * 5, "n": 1000}, "n", "4096"),
    ({"temperature": -0.1}, "temperature", "greater"),
    ({"temperature": float("nan")}, "temperature", "finite"),
    ({"temperature": float("inf")}, "temperature", "finite|less"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_p": 1.1}, "top_p", "less"),
    ({"top_k": -2}, "top_k", "greater"),
    ({"seed": 2**64}, "seed", "less"),
    ({"stop_token_ids": [99]}, "stop_token_ids", "outside the vocabulary"),
    ({"stop_token_ids": "a"}, "stop_token_ids", "list"),
    ({"ignore_eos": "yes"}, "ignore_eos", "boolean"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"echo": True, "stream": True, "logprobs": 1}, "echo", "stream"),
    ({"best_of": 2}, "best_of", "not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "no token of this model can come next"),
    ({"logit_bias": {"99": 1.0}}, "logit_bias", "vocabulary"),
    ({"presence_penalty": 3}, "presence_penalty", "less"),
    ({"allowed_token_ids": [1]}, "allowed_token_ids", "not supported"),
    ({"color": "red"}, "color", "unknown field"),
]
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": "a"}, "messages", "list"),
    ({"messages": [{"role": "user"}]}, "messages", "missing"),
    ({"messages": [{"role": "king", "content": "a"}]}, "messages", "role"),
    ({"messages": [{"role": "user", "content": "a", "mood": 1}]}, "messages", "mood"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages", "not valid Unicode"),
    ({"messages": [{"role": "user", "content": "a" * 70}]}, "messages", "at most 63"),
    ({"max_completion_tokens": 3}, "max_completion_tokens", "differ"),
    ({"logprobs": 1}, "logprobs", "boolean"),
    ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
    ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "no tools"),
]
BAD = [("/v1/completions", COMPLETION | body, *why) for body, *why in BAD_COMPLETIONS] + [
    ("/v1/chat/completions", CHAT | body, *why) for body, *why in BAD_CHATS
]


@pytest.mark.parametrize(("path", "body", "param", "message"), BAD)
def test_bad_fields_are_refused_by_name(
    server: httpx.Client, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    content = json.dumps(body).encode()  # NaN and lone surrogates included, as a careless client would
    answer = server.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert any(part in error["message"] for part in message.split("|")), error["message"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b"\xff\xfe", b"[" * 5000, b'{"prompt": "a"'])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/update_weights"])
def test_bodies_that_are_no_request_are_refused(server: httpx.Client, path: str, content: bytes) -> None:
    answer = server.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]


def test_other_errors_have_the_same_shape(server: httpx.Client, model_dir: Path) -> None:
    other = server.post("/v1/completions", json=COMPLETION | {"model": "gpt"})
    assert other.status_code == 404
    assert other.json()["error"]["param"] == "model" and str(model_dir) in other.json()["error"]["message"]
    nowhere = server.get("/nowhere")
    assert nowhere.status_code == 404 and "/nowhere" in nowhere.json()["error"]["message"]
    assert server.get("/v1/completions").status_code == 405
    assert server.get("/v1/completions").json()["error"]["type"] == "invalid_request_error"


def test_weights_are_updated_or_refused(server: httpx.Client, model_dir: Path, tmp_path: Path) -> None:
    new = write_tiny_model(tmp_path / "new", seed=1)
    body = {"path": str(new), "version": 4}
    refused = server.post("/update_weights", json=body)
    assert refused.status_code == 400 and "manifest.json" in refused.json()["error"]["message"]
    assert server.post("/update_weights", json={"path": str(new), "version": "4"}).status_code == 400
    assert server.get("/health").json()["version"] == 0

    ask = COMPLETION | {"temperature": 0, "logprobs": 0, "return_token_ids": True}
    before = complete(server, **ask)["choices"][0]
    write_manifest(new, 4)
    assert server.post("/update_weights", json=body).json() == {"version": 4}
    after = complete(server, **ask)["choices"][0]
    assert set(after["weight_versions"]) == {4}
    assert after["logprobs"]["token_logprobs"] != before["logprobs"]["token_logprobs"]
    assert server.get("/health").json()["version"] == 4


def test_pause_and_resume(server: httpx.Client) -> None:
    assert server.post("/pause").json()["paused"] is True
    assert server.get("/health").json()["paused"] is True
    with pytest.raises(httpx.ReadTimeout):
        server.post("/v1/completions", json=COMPLETION, timeout=httpx.Timeout(60, read=0.3))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.post, "/v1/completions", json=COMPLETION)
        assert server.post("/resume").json()["paused"] is False
        assert waiting.result(timeout=30 * PATIENCE).status_code == 200


def test_sigterm_lets_running_requests_finish(model_dir: Path) -> None:
    process, client = start_server(model_dir, "--drain-timeout-s", str(30 * PATIENCE))
    try:
        with ThreadPoolExecutor() as pool:
            body = {"prompt": "abc", "max_tokens": 60, "n": 1000, "ignore_eos": True}
            running = pool.submit(client.post, "/v1/completions", json=body)

            def is_running() -> bool:
                nonlocal running
                if running.done():  # before it was seen
                    running = pool.submit(client.post, "/v1/completions", json=body)
                return number(client, "tandem_sequences_running") > 0

            wait_until(is_running, 60, "the request to run")
            process.send_signal(signal.SIGTERM)
            assert len(running.result(timeout=60 * PATIENCE).json()["choices"]) == 1000
        assert process.wait(timeout=20 * PATIENCE) == 0
    finally:
        end(process, client)


def test_a_server_says_where_it_listens_and_answers_head(model_dir: Path) -> None:
    process, client = start_server(model_dir)
    try:
        answer = client.head("/health")
        assert answer.status_code == 200 and answer.content == b""
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=60 * PATIENCE)
        assert f"serving {model_dir} on {str(client.base_url).rstrip('/')}" in output
    finally:
        end(process, client)


WITHOUT_LIBRARY = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "llguidance" else find(name, *rest)
sys.modules["llguidance"] = None
from tandem.entrypoints.inference import main
main()
"""


def test_a_server_without_llguidance_refuses_structures_and_serves_the_rest(model_dir: Path) -> None:
    process, client = start_server(model_dir, command=[sys.executable, "-c", WITHOUT_LIBRARY])
    try:
        refused = client.post("/v1/completions", json=COMPLETION | {"response_format": {"type": "json_object"}})
        assert refused.status_code == 400 and "tandem-rl[structured]" in refused.json()["error"]["message"]
        assert refused.json()["error"]["param"] == "response_format"
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200
    finally:
        end(process, client)


BOMB = {"type": "integer", "allOf": [{"multipleOf": 97}, {"multipleOf": 101}, {"multipleOf": 103}]}


def test_a_bomb_holds_up_nobody(tiny_model: Path) -> None:
    """It compiles for seconds, or for too many; health and completions are answered meanwhile."""
    process, client = start_server(tiny_model)
    try:
        with ThreadPoolExecutor(1) as threads:
            bomb = threads.submit(
                client.post, "/v1/completions", json=COMPLETION | {"structured_outputs": {"json": BOMB}}, timeout=120
            )
            served = 0
            while not bomb.done():
                assert client.get("/health").status_code == 200
                assert client.post("/v1/completions", json=COMPLETION).status_code == 200
                served += 1
            assert served > 3
            answer = bomb.result()
        assert answer.status_code == 200 or "more than 5 s to compile" in answer.json()["error"]["message"]
        well = client.post("/v1/completions", json=COMPLETION | {"structured_outputs": {"choice": ["a"]}}, timeout=60)
        assert well.status_code == 200 and well.json()["choices"][0]["text"] == "a"
    finally:
        end(process, client)


def test_sigterm_does_not_wait_for_ever(model_dir: Path) -> None:
    process, client = start_server(model_dir, "--drain-timeout-s", "0.2")
    try:
        client.post("/pause")
        with ThreadPoolExecutor() as pool:
            running = pool.submit(client.post, "/v1/completions", json=COMPLETION)
            wait_until(lambda: number(client, "tandem_http_requests_open") == 2, 20, "the request to arrive")
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20 * PATIENCE) == 0
            assert running.exception(timeout=20) is not None or running.result().status_code >= 500
    finally:
        end(process, client)


# A model that takes for ever to load, to be sure that it is being loaded.
SLOW_LOADING = """
import sys
import torch
from tandem.entrypoints.inference import run
from tandem.engine import build

def load_for_ever(*_):
    print("loading", flush=True)
    while True:
        torch.ones(1 << 20).exp()

build.load_decoder = load_for_ever
run()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_server_that_is_still_loading(model_dir: Path, number: signal.Signals) -> None:
    options = ["--model.name", str(model_dir), "--server.port", str(free_port())]
    process = subprocess.Popen([sys.executable, "-c", SLOW_LOADING, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and "loading\n" in process.stdout
        time.sleep(0.2)
        process.send_signal(number)
        assert process.wait(timeout=10 * PATIENCE) == 0
    finally:
        process.kill()
        process.communicate()


def run_inference(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([INFERENCE, *options], capture_output=True, text=True, timeout=60 * PATIENCE)


def test_a_port_in_use_is_refused_with_a_free_one(model_dir: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run_inference("--model.name", str(model_dir), "--server.port", str(port))
    assert result.returncode == 2
    assert f"server.port = {port}" in result.stderr and "is free" in result.stderr
    assert result.stdout == "", "nothing may have been loaded"


def test_a_model_that_is_not_there_is_refused(tmp_path: Path, model_dir: Path) -> None:
    missing = run_inference("--model.name", str(tmp_path / "none"))
    assert missing.returncode == 2 and f"model.name = '{tmp_path / 'none'}'" in missing.stderr
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_bytes((model_dir / "config.json").read_bytes())
    empty = run_inference("--model.name", str(tmp_path / "empty"))
    assert empty.returncode == 2 and "holds no weights" in empty.stderr


def test_a_client_that_goes_away_leaves_nothing_running(model_dir: Path) -> None:
    process, client = start_server(model_dir, "--max-sequences", "2")
    try:
        # Minutes of work for two sequences at a time: only if it is dropped is the next one answered soon.
        body = {"prompt": "abc", "max_tokens": 60, "n": 1024, "ignore_eos": True}
        for _ in range(8):
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body, timeout=httpx.Timeout(30, read=0.1))
        started = time.monotonic()
        assert client.post("/v1/completions", json=COMPLETION).status_code == 200
        assert time.monotonic() - started < 5 * PATIENCE
    finally:
        end(process, client)


BROKEN = """
import tandem.engine.runner as runner
def forward(*arguments): raise RuntimeError("out of luck")
runner.Runner.forward = forward
from tandem.entrypoints.inference import main
main()
"""


def test_an_engine_that_fails_answers_and_ends_the_process(model_dir: Path) -> None:
    process, client = start_server(model_dir, command=[sys.executable, "-c", BROKEN])
    try:
        answer = client.post("/v1/completions", json=COMPLETION)
        assert answer.status_code == 503 and "out of luck" in answer.json()["error"]["message"]
        output, _ = process.communicate(timeout=20 * PATIENCE)
        assert process.returncode == 1 and "inference: the engine failed: RuntimeError: out of luck" in output
    finally:
        end(process, client)
