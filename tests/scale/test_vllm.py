"""`inference --engine vllm` with vLLM's CPU build: the API the orchestrator sees, and weights changed under way.

One server serves nearly all tests; each that needs certain weights loads them first.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.integration.processes import Starter, wait_until
from tests.patience import PATIENCE
from tests.ports import free_port
from tests.scale.hosts import Host
from tests.scale.vllm_models import FIRST_TOKEN, publish_counting, publish_random
from tests.scale.vllm_server import (
    EAGER,
    KEY,
    TRIES,
    VllmServer,
    descendants,
    launch,
    send_until_running,
    start,
    wait_until_gone,
    wait_until_ready,
)
from tokenizers import Tokenizer

from tandem import UserError, VLLMEngine
from tandem.python.pool import Job
from tandem.types.identity import ServerIdentity
from tandem.types.rollout import Completion, SamplingRequest
from tandem.utils.files import read_json, read_json_lines, write_json
from tandem.utils.manifest import write_manifest

PROMPT = [1, 4, 101, 71, 72, 73, 74, 2, 101, 1, 5, 101]
LONG_PROMPT = [1, 4, 101, *(6 + i * 7 % 95 for i in range(294)), 2, 101, 5]
ENOUGH_TOKENS = 400  # for an update to arrive in between


@pytest.fixture(scope="module")
def tiny_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a tokenizer that has more tokens than the model embeddings, the padding of vLLM's included."""
    folder = tmp_path_factory.mktemp("models") / "padded"
    shutil.copytree(tiny_model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<extra{number}>" for number in range(80)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def server(vllm_python: Path, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    log, drain = tmp_path_factory.mktemp("vllm") / "server.log", ("--drain-timeout-s", str(30 * PATIENCE))
    # With vLLM's own control routes, so that tests can show that they need the key too; and with its usual processes.
    started = start(vllm_python, tiny_model, log, *drain, environment=EAGER | {"VLLM_SERVER_DEV_MODE": "1"})
    yield started
    started.end()


@pytest.fixture(scope="module")
def counting(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Versions that say their own number, whatever they are asked."""
    folder = tmp_path_factory.mktemp("counting")
    return {version: publish_counting(tiny_model, folder / str(version), version) for version in range(1, 8)}


@pytest.fixture(scope="module")
def random_weights(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish_random(tiny_model, tmp_path_factory.mktemp("random") / "weights", version=3, seed=5)


def reference_logprobs(model_dir: Path, prompt: list[int], token_ids: list[int], temperature: float) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(1, torch.tensor(token_ids)[:, None])[:, 0]


def assert_logprobs(choice: dict[str, Any], model_dir: Path, prompt: list[int], temperature: float) -> None:
    given = torch.tensor(choice["logprobs"]["token_logprobs"])
    expected = reference_logprobs(model_dir, prompt, choice["token_ids"], temperature)
    torch.testing.assert_close(given, expected, atol=1e-4, rtol=0)


def seen_versions(choice: dict[str, Any]) -> list[int]:
    return [token - FIRST_TOKEN for token in choice["token_ids"]]


def test_health_is_what_every_engine_answers(server: VllmServer, tiny_model: Path) -> None:
    with httpx.Client(base_url=server.http.base_url, trust_env=False) as bare:
        health = bare.get("/health").json()
    assert len(health.pop("instance")) == 32
    assert health == {"status": "ok", "version": 0, "model": str(tiny_model), "paused": False, "run": None}


def test_every_answer_says_who_gave_it_and_whose_weights(
    server: VllmServer, tiny_model: Path, counting: dict[int, Path]
) -> None:
    instance = server.health()["instance"]
    update = {"path": str(counting[1]), "version": 1}
    body = {"prompt": PROMPT, "max_tokens": 1, "return_token_ids": True}
    taken = server.http.post("/update_weights", json=update | {"run": "one"})
    answers = [
        server.http.post("/v1/completions", json=body),
        server.http.post("/v1/completions", json=body | {"stream": True}),
        server.http.post("/v1/completions", json={"prompt": -1}),
        server.http.get("/nowhere"),
        server.http.get("/v1/models", headers={"Authorization": "Bearer wrong"}),
    ]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 401]
    for answer in answers:
        identity = ServerIdentity.from_headers(answer.headers)
        assert identity is not None
        assert (identity.instance, identity.version, identity.runs) == (instance, 1, ("one",))
    assert taken.headers["x-tandem-run"] == "-, one"
    assert server.http.post("/update_weights", json=update | {"run": "two"}).headers["x-tandem-run"] == "one, two"
    displaced = server.http.post("/update_weights", json=update | {"run": "one"})
    assert displaced.status_code == 409 and "replaced by run 'two'" in displaced.json()["error"]["message"]
    server.update(tiny_model, 0)  # as the other tests find it
    assert server.health()["run"] is None


def can_connect(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def test_a_second_server_on_the_port_is_refused_while_the_first_loads(
    vllm_python: Path, tiny_model: Path, tmp_path: Path
) -> None:
    port = free_port()
    first = launch(vllm_python, tiny_model, tmp_path / "first.log", "--port", str(port))
    try:
        wait_until(lambda: first.poll() is not None or can_connect(port), 120, "the first to listen")
        second = launch(vllm_python, tiny_model, tmp_path / "second.log", "--port", str(port))
        assert second.wait(120 * PATIENCE) == 2
        assert first.poll() is None
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    assert f"server.port = {port} cannot be bound" in (tmp_path / "second.log").read_text()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("POST", "/update_weights"),
        ("POST", "/pause"),
        ("POST", "/resume"),
        ("POST", "/collective_rpc"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/sleep"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/docs"),
        ("GET", "/nowhere"),
        ("GET", "/health/"),
        ("POST", "//health"),
    ],
)
@pytest.mark.parametrize("header", [None, b"", b"Bearer wrong", KEY.encode(), b"Bearer \xff\xfe"])
def test_every_other_route_needs_the_key(server: VllmServer, method: str, path: str, header: bytes | None) -> None:
    with httpx.Client(base_url=server.http.base_url, trust_env=False) as bare:
        answer = bare.request(method, path, headers=[] if header is None else [(b"Authorization", header)])
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"


def test_a_completion_is_what_the_orchestrator_expects(server: VllmServer) -> None:
    body = {"prompt": PROMPT, "n": 3, "max_tokens": 8, "temperature": 0.7, "seed": 11}
    choices = server.complete(**body)
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    for choice in choices:
        num_tokens = len(choice["token_ids"])
        assert 1 <= num_tokens <= 8 and len(choice["logprobs"]["token_logprobs"]) == num_tokens
        assert choice["weight_versions"] == [0] * num_tokens
        assert choice["prompt_token_ids"] == PROMPT
        assert choice["finish_reason"] == ("stop" if choice["token_ids"][-1] == 2 else "length")
    assert len({tuple(choice["token_ids"]) for choice in choices}) > 1
    again = server.complete(**body)
    assert [choice["token_ids"] for choice in again] == [choice["token_ids"] for choice in choices]


def test_several_prompts_and_text_prompts(server: VllmServer) -> None:
    choices = server.complete(prompt=[PROMPT, [7, 8, 9]], n=2, max_tokens=3, ignore_eos=True)
    assert [choice["prompt_token_ids"] for choice in choices] == [PROMPT, PROMPT, [7, 8, 9], [7, 8, 9]]
    assert [choice["weight_versions"] for choice in choices] == [[0] * 3] * 4
    [choice] = server.complete(prompt="abc", max_tokens=3, ignore_eos=True)
    assert choice["weight_versions"] == [0] * 3


def test_extras_are_left_out_unless_asked_for(server: VllmServer) -> None:
    answer = server.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
    assert answer.status_code == 200 and "weight_versions" not in answer.json()["choices"][0]


def test_chat_has_versions_too(server: VllmServer) -> None:
    body = {"messages": [{"role": "user", "content": "abc"}], "n": 2, "max_tokens": 4, "ignore_eos": True}
    answer = server.http.post("/v1/chat/completions", json=body | {"return_token_ids": True}).json()
    for choice in answer["choices"]:
        assert choice["prompt_token_ids"] and choice["weight_versions"] == [0] * 4


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_transformers_at_the_temperature(
    server: VllmServer, tiny_model: Path, temperature: float
) -> None:
    server.update(tiny_model, 0)
    [choice] = server.complete(prompt=PROMPT, max_tokens=32, temperature=temperature, seed=3, ignore_eos=True)
    assert_logprobs(choice, tiny_model, PROMPT, temperature)


def test_logprobs_after_a_swap_and_of_a_cached_prompt(
    server: VllmServer, tiny_model: Path, random_weights: Path
) -> None:
    server.update(tiny_model, 0)
    assert len(LONG_PROMPT) == 300
    ask = {"prompt": LONG_PROMPT, "max_tokens": 16, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    [computed], [before] = server.complete(**ask), server.complete(**ask)  # the second time from the cache
    for choice in (computed, before):
        assert_logprobs(choice, tiny_model, LONG_PROMPT, 1.0)
    server.update(random_weights, 3)
    assert server.health()["version"] == 3
    [after] = server.complete(**ask)
    assert_logprobs(after, random_weights, LONG_PROMPT, 1.0)
    assert set(after["weight_versions"]) == {3} and set(before["weight_versions"]) == {0}
    assert after["token_ids"] != before["token_ids"]


def run_under_way(
    server: VllmServer, pool: ThreadPoolExecutor, counting: dict[int, Path], **extra: Any
) -> list[Future[list[dict[str, Any]]]]:
    """Requests of all shapes under version 1, with some of their tokens already made."""
    server.update(counting[1], 1)
    # A temperature at which no other token has a chance; vLLM wants n = 1 at temperature 0.
    shapes: list[dict[str, Any]] = [
        {"prompt": PROMPT},
        {"prompt": [7, 8, 9], "n": 3},
        {"prompt": [PROMPT, [20, 21], PROMPT[:5]], "n": 2},
    ]
    rest = {"max_tokens": ENOUGH_TOKENS, "ignore_eos": True, "temperature": 0.5, **extra}
    return send_until_running(server, lambda: [pool.submit(server.complete, **shape, **rest) for shape in shapes])


def test_keep_gives_every_token_the_version_that_made_it(server: VllmServer, counting: dict[int, Path]) -> None:
    for _ in range(TRIES):
        with ThreadPoolExecutor() as pool:
            futures = run_under_way(server, pool, counting)
            for version in (2, 3, 4, 5):
                server.update(counting[version], version)
                time.sleep(0.15)
            choices = [choice for future in futures for choice in future.result()]
        assert len(choices) == 1 + 3 + 6
        for choice in choices:
            assert len(choice["token_ids"]) == ENOUGH_TOKENS
            assert choice["weight_versions"] == seen_versions(choice)
        if any(len(set(choice["weight_versions"])) >= 3 for choice in choices):
            return
    pytest.fail("no two updates came in between")


def test_updates_in_a_row_are_exact_for_requests_that_come_and_go(
    server: VllmServer, counting: dict[int, Path]
) -> None:
    """Short requests are met by updates before their first token, after their last, and everywhere else."""
    server.update(counting[1], 1)
    body = {"prompt": PROMPT, "n": 2, "max_tokens": 12, "ignore_eos": True, "temperature": 0.5}
    version, found = 1, set[tuple[int, ...]]()
    for _ in range(TRIES):
        with ThreadPoolExecutor(8) as pool:
            futures = [pool.submit(server.complete, **body) for _ in range(60)]
            while not all(future.done() for future in futures):
                version = version % 7 + 1
                server.update(counting[version], version)
            choices = [choice for future in futures for choice in future.result()]
        for choice in choices:
            assert choice["weight_versions"] == seen_versions(choice)
        found |= {tuple(choice["weight_versions"]) for choice in choices}
        if len(found) > 3:
            return
    pytest.fail("the updates met no request")


def only_version(choice: dict[str, Any]) -> int:
    """The version that made all its tokens: the new one where vLLM had not begun the request when the update came."""
    versions = choice["weight_versions"]
    assert versions == seen_versions(choice) and len(set(versions)) <= 1
    return versions[0] if versions else 1


def test_abort_ends_running_requests_with_the_tokens_they_have(server: VllmServer, counting: dict[int, Path]) -> None:
    for _ in range(TRIES):
        with ThreadPoolExecutor() as pool:
            futures = run_under_way(server, pool, counting)
            server.update(counting[2], 2, mode="abort")
            choices = [choice for future in futures for choice in future.result()]
        for choice in choices:
            is_aborted = len(choice["token_ids"]) < ENOUGH_TOKENS
            assert choice["finish_reason"] == ("abort" if is_aborted else "length")
            assert only_version(choice) == 1 or not is_aborted
        if all(choice["finish_reason"] == "abort" for choice in choices):
            break
    else:
        pytest.fail("no update came while all requests ran")
    [after] = server.complete(prompt=PROMPT, max_tokens=3, temperature=0, ignore_eos=True)
    assert after["weight_versions"] == seen_versions(after) == [2, 2, 2]


def test_wait_lets_running_requests_finish_under_the_old_weights(server: VllmServer, counting: dict[int, Path]) -> None:
    for _ in range(TRIES):
        with ThreadPoolExecutor() as pool:
            futures = run_under_way(server, pool, counting, max_tokens=150)
            server.update(counting[2], 2, mode="wait")
            choices = [choice for future in futures for choice in future.result()]
        for choice in choices:
            assert (choice["finish_reason"], len(choice["token_ids"])) == ("length", 150)
        if all(only_version(choice) == 1 for choice in choices):
            return
    pytest.fail("no update came while all requests ran")


def test_a_stream_carries_versions(server: VllmServer, counting: dict[int, Path]) -> None:
    for _ in range(TRIES):
        server.update(counting[1], 1)
        versions = stream_across_an_update(server, counting[2], 2)
        if all(set(versions[index]) == {1, 2} for index in (0, 1)):
            return
    pytest.fail("no update came in between")


def stream_across_an_update(server: VllmServer, path: Path, version: int) -> dict[int, list[int]]:
    """The versions of a stream's two samples, held against their tokens; the update is sent after some of them."""
    body = {"prompt": PROMPT, "n": 2, "max_tokens": ENOUGH_TOKENS, "ignore_eos": True, "temperature": 0.5}
    token_ids: dict[int, list[int]] = {0: [], 1: []}
    versions: dict[int, list[int]] = {0: [], 1: []}
    with (
        ThreadPoolExecutor() as pool,
        server.http.stream("POST", "/v1/completions", json=body | {"stream": True, "return_token_ids": True}) as answer,
    ):
        update = None
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                token_ids[choice["index"]] += choice["token_ids"]
                versions[choice["index"]] += choice["weight_versions"]
            if update is None and len(token_ids[0]) > 5:
                update = pool.submit(server.update, path, version)
    for index in (0, 1):
        assert len(token_ids[index]) == ENOUGH_TOKENS
        assert versions[index] == [token - FIRST_TOKEN for token in token_ids[index]]
    return versions


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def change_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_manifest(folder, 6)

    return apply


def change_config(folder: Path) -> None:
    write_json(folder / "config.json", read_json(folder / "config.json") | {"rope_theta": 5.0})
    write_manifest(folder, 6)


NORM = "model.layers.2.input_layernorm.weight"
DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (cut_short, "bytes, the manifest says"),
    (flip_a_bit, "checksum"),
    (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
    (lambda folder: write_manifest(folder, 9), "holds version 9"),
    (lambda folder: (folder / "model.safetensors").unlink(), "missing"),
    (shutil.rmtree, "no directory"),
    (change_tensors(lambda tensors: tensors.__delitem__(NORM)), f"missing, first '{NORM}'"),
    (change_tensors(lambda tensors: tensors.update({NORM: torch.ones(7)})), "has shape (7,), the model needs (128,)"),
    (change_tensors(lambda tensors: tensors.update({"extra": torch.ones(7)})), "belong to no parameter"),
    (change_tensors(lambda tensors: tensors.update({NORM: torch.ones(128, dtype=torch.int32)})), "of type I32"),
    (change_config, "rope_theta"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_a_bad_checkpoint_leaves_the_old_weights_serving(
    server: VllmServer,
    tiny_model: Path,
    random_weights: Path,
    tmp_path: Path,
    damage: Callable[[Path], Any],
    message: str,
) -> None:
    server.update(random_weights, 3)
    ask = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    [before] = server.complete(**ask)
    bad = publish_random(tiny_model, tmp_path / "bad", version=6, seed=8)
    damage(bad)
    answer = server.http.post("/update_weights", json={"path": str(bad), "version": 6})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == "weights_refused" and message in error["message"]
    health = server.health()
    assert (health["status"], health["version"], health["paused"]) == ("ok", 3, False)
    [after] = server.complete(**ask)
    assert after["token_ids"] == before["token_ids"] and after["weight_versions"] == [3] * 6
    assert_logprobs(after, random_weights, PROMPT, 1.0)


def test_a_refused_update_does_not_disturb_running_requests(
    server: VllmServer, counting: dict[int, Path], tmp_path: Path
) -> None:
    with ThreadPoolExecutor() as pool:
        futures = run_under_way(server, pool, counting, max_tokens=150)
        answer = server.http.post("/update_weights", json={"path": str(tmp_path), "version": 2, "mode": "abort"})
        assert answer.status_code == 400
        assert all(c["weight_versions"] == [1] * 150 for future in futures for c in future.result())


def test_pause_holds_requests_and_outlasts_an_update(server: VllmServer, counting: dict[int, Path]) -> None:
    server.update(counting[1], 1)
    ask = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    assert server.http.post("/pause").json() == {"status": "paused", "paused": True}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(server.complete, **ask)
        server.update(counting[2], 2)
        assert server.health()["paused"] is True
        time.sleep(0.5)
        assert not waiting.done()
        assert server.http.post("/resume").json() == {"status": "resumed", "paused": False}
        [choice] = waiting.result()
    assert choice["weight_versions"] == seen_versions(choice) == [2] * 4


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 5000}, 400, "max_tokens"),
        ("POST", "/v1/completions", {"prompt": PROMPT, "model": "gpt"}, 404, "model"),
        ("POST", "/update_weights", {"path": "x"}, 400, "version"),
        ("POST", "/update_weights", {"path": "x", "version": "1"}, 400, "version"),
        ("POST", "/update_weights", {"path": "x", "version": 1, "mode": "later"}, 400, "mode"),
        ("POST", "/update_weights", {"path": "x", "version": 1, "more": 1}, 400, "more"),
        ("POST", "/pause?mode=later", None, 400, "mode"),
        ("POST", "/collective_rpc", {"method": "no_such_method"}, 500, None),
        ("GET", "/nowhere", None, 404, None),
        ("GET", "/v1/completions", None, 405, None),
    ],
)
def test_errors_have_one_shape(
    server: VllmServer, method: str, path: str, body: dict[str, Any] | None, status: int, param: str | None
) -> None:
    answer = server.http.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and error["message"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe"])
@pytest.mark.parametrize("path", ["/v1/completions", "/update_weights"])
def test_bodies_that_are_no_request_are_refused(server: VllmServer, path: str, content: bytes) -> None:
    answer = server.http.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_a_body_that_is_too_large_is_refused(server: VllmServer) -> None:
    answer = server.http.post("/v1/completions", content=b" " * (65 << 20))
    assert answer.status_code == 413 and "64 MiB" in answer.json()["error"]["message"]
    chunked = server.http.post("/v1/completions", content=(b" " * (1 << 20) for _ in range(65)))
    assert chunked.status_code == 413


def test_a_client_that_goes_away_leaves_nothing_counted(server: VllmServer, counting: dict[int, Path]) -> None:
    server.update(counting[1], 1)
    body = {"prompt": PROMPT, "max_tokens": ENOUGH_TOKENS, "n": 8, "ignore_eos": True, "return_token_ids": True}
    num_gone = 0
    while num_gone < 4:  # a busy machine may find the answer before it finds that it is late
        try:
            server.http.post("/v1/completions", json=body, timeout=httpx.Timeout(60, read=0.2))
        except httpx.ReadTimeout:
            num_gone += 1
    server.update(counting[2], 2)
    [choice] = server.complete(prompt=PROMPT, max_tokens=4, temperature=0, ignore_eos=True)
    assert choice["weight_versions"] == seen_versions(choice) == [2] * 4


def test_what_would_end_the_engine_is_refused(server: VllmServer, tiny_model: Path) -> None:
    beyond = Tokenizer.from_file(str(tiny_model / "tokenizer.json")).get_vocab_size() - 1
    chat = {"messages": [{"role": "user", "content": "<extra79>"}]}
    for path, body in (
        ("/v1/completions", {"prompt": "a<extra79>"}),
        ("/v1/completions", {"prompt": [5, beyond]}),
        ("/v1/chat/completions", chat),
    ):
        answer = server.http.post(path, json={"max_tokens": 2} | body)
        assert answer.status_code == 400, answer.text
        assert f"token id {beyond} is outside" in answer.json()["error"]["message"]
    assert server.http.post("/update_weights", json={"path": "/etc", "version": 0}).status_code == 400


def test_the_python_api_asks_a_server_that_runs(
    server: VllmServer, tiny_model: Path, counting: dict[int, Path], tmp_path: Path
) -> None:
    url = str(server.http.base_url)

    async def run() -> list[list[Completion]]:
        async with VLLMEngine(tiny_model, base_url=f"{url}/v1", api_key=KEY) as engine:
            texts = await engine.generate(["hello", "world"], n=3, max_tokens=8)
            assert [len(group) for group in texts] == [3, 3]
            await engine.update_weights(counting[6], 6)
            answer = asyncio.get_running_loop().create_future()
            return await engine.sample([Job(PROMPT, SamplingRequest(2, 4, 1e-5, seed=1), answer)])

    (group,) = asyncio.run(run())
    assert [(one.versions, one.token_ids) for one in group] == [([6] * 4, [FIRST_TOKEN + 6] * 4)] * 2
    for key, root, problem in ((KEY, Path("/nowhere"), "--server.weight-roots"), ("wrong", tmp_path, "401")):
        with pytest.raises(UserError, match=problem):
            asyncio.run(VLLMEngine(tiny_model, base_url=url, api_key=key).start(weight_roots=[root]))


def test_rl_on_a_server_that_runs(server: VllmServer, tiny_model: Path, tmp_path: Path) -> None:
    """Whole weights after every step, one version behind at most."""
    shared, run, starter = tmp_path / "no_inference.toml", tmp_path / "run", Starter()
    shared.write_text(Path("examples/reverse_text/rl.toml").read_text().split("[inference]")[0])
    starter.environment["TANDEM_TEST_KEY"] = KEY
    try:
        done = starter.run(
            "rl",
            *("@", str(shared), "--model.name", str(tiny_model), "--output-dir", str(run), "--max-steps", "6"),
            *("--orchestrator.client.base-url", str(server.http.base_url).rstrip("/")),
            *("--orchestrator.client.api-key-var", "TANDEM_TEST_KEY", "--orchestrator.eval.every", "None"),
            *("--orchestrator.prompts-per-step", "4", "--orchestrator.sampling.temperature", "0.8"),
        )
    finally:
        starter.end_all()
    assert done.returncode == 0, done.stdout
    trainer = {row["step"]: row for row in read_json_lines(run / "metrics.jsonl") if row["process"] == "trainer"}
    assert sorted(trainer) == [1, 2, 3, 4, 5, 6]
    # On-policy, the trainer computes the log-probs that vLLM gave, at the sampling temperature.
    assert trainer[1]["mismatch_kl"] < 1e-6 and abs(trainer[1]["ratio"] - 1) < 1e-4
    rows = read_json_lines(run / "samples" / "step_000004.jsonl")
    assert {row["oldest_version"] for row in rows} <= {2, 3}, "at most one version behind"


def test_sigterm_lets_running_requests_finish_and_leaves_no_process(
    server: VllmServer, counting: dict[int, Path]
) -> None:
    """The last test with this server."""
    server.update(counting[1], 1)
    family = descendants(server.process.pid)
    assert family, "vLLM's engine is a process of its own"
    with ThreadPoolExecutor() as pool:
        body = {"prompt": PROMPT, "max_tokens": ENOUGH_TOKENS, "ignore_eos": True}
        [running] = send_until_running(server, lambda: [pool.submit(server.complete, **body)])
        assert server.stop() == 0
        assert len(running.result()[0]["token_ids"]) == ENOUGH_TOKENS
    wait_until_gone(family)


def test_two_data_parallel_ranks_as_head_and_headless(
    vllm_python: Path, tiny_model: Path, counting: dict[int, Path], two_hosts: list[Host], tmp_path: Path
) -> None:
    """On two hosts. Both ranks get every update, and tokens of both carry exact versions."""
    address = ["--data-parallel-address", two_hosts[0].address, "--data-parallel-rpc-port", "13345"]
    size = ["--data-parallel-size", "2", "--data-parallel-size-local", "1", *address]
    start_head, start_other = (partial(launch, vllm_python, tiny_model, host=host) for host in two_hosts)
    head = start_head(tmp_path / "head.log", "--host", "0.0.0.0", "--port", "8000", *size)
    other = start_other(tmp_path / "headless.log", *size, "--headless", "--data-parallel-start-rank", "1")
    clients = ExitStack()
    key = {"Authorization": f"Bearer {KEY}"}
    http = clients.enter_context(two_hosts[0].client(8000, headers=key, timeout=120 * PATIENCE))
    server = VllmServer(head, http, tmp_path / "head.log")
    try:
        wait_until_ready([server], [other])
        for _ in range(TRIES):
            with ThreadPoolExecutor() as pool:
                futures = run_under_way(server, pool, counting)
                for version in (2, 3):
                    server.update(counting[version], version)
                choices = [choice for future in futures for choice in future.result()]
            for choice in choices:
                assert choice["weight_versions"] == seen_versions(choice)
            if any(len(set(choice["weight_versions"])) > 1 for choice in choices):
                break
        else:
            pytest.fail("no update came in between")
        metrics = server.http.get("/metrics").text
        generated = [
            float(line.rsplit(" ", 1)[1])
            for line in metrics.splitlines()
            if line.startswith("vllm:generation_tokens_total")
        ]
        assert len(generated) == 2 and min(generated) > 0, "both ranks should have worked"
        families = descendants(head.pid) | descendants(other.pid)
        assert server.stop() == 0
        # Nobody tells a headless node that its head is gone: each node is ended by what started it. Killed, it
        # cannot end its engine any more; that has to go by itself.
        other.kill()
        other.wait(timeout=60 * PATIENCE)
        wait_until_gone(families)
    finally:
        server.end()
        VllmServer(other, http, tmp_path / "headless.log").end()
        clients.close()
