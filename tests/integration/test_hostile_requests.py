"""A real server against what strangers send: it answers, says why not, and goes on serving everybody else."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.integration.processes import Starter, wait_until
from tests.integration.servers import wait_until_healthy
from tests.patience import PATIENCE
from tests.ports import free_port
from tokenizers import Tokenizer

from tandem.utils.files import read_json, write_json

PAD = "<pad2>"
LONG = {"prompt": "abc", "max_tokens": 400, "ignore_eos": True}


def start(starter: Starter, model: Path, *options: str) -> tuple["subprocess.Popen[str]", httpx.Client]:
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    process = starter.start("inference", "--model.name", str(model), "--port", str(port), "--threads", "1", *options)
    wait_until_healthy(process, base_url)
    return process, httpx.Client(base_url=base_url, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a pad token that the embedding has no row for."""
    folder = tmp_path_factory.mktemp("hostile") / "models" / "padded"
    shutil.copytree(tiny_model, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([PAD])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[tuple["subprocess.Popen[str]", httpx.Client]]:
    starter = Starter()
    try:
        process, client = start(starter, model)
        with client:
            yield process, client
        process.terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0 and "Traceback" not in output, output
        assert f"'{PAD}'" in output  # told at the start
        assert "\x1b" not in output and "\nforged" not in output
    finally:
        starter.end_all()


@pytest.fixture
def server(served: tuple["subprocess.Popen[str]", httpx.Client]) -> httpx.Client:
    return served[1]


def test_a_token_beyond_the_embedding_costs_its_request_and_nothing_else(server: httpx.Client) -> None:
    with server.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        for path, body in (
            ("/v1/completions", {"prompt": PAD}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": PAD}]}),
        ):
            answer = server.post(path, json=body)
            assert answer.status_code == 400 and PAD in answer.json()["error"]["message"]
        assert list(lines)[-1] == "data: [DONE]"


def test_health_is_answered_while_huge_texts_come(server: httpx.Client) -> None:
    """Eight megabytes took many seconds to encode; now they are refused, and nobody waits for it."""
    answers: list[httpx.Response] = []
    body = {"prompt": "tandem " * (8 << 20 >> 3)}
    thread = threading.Thread(target=lambda: answers.append(server.post("/v1/completions", json=body)))
    thread.start()
    longest = 0.0
    while thread.is_alive():
        started = time.monotonic()
        assert server.get("/health").status_code == 200
        longest = max(longest, time.monotonic() - started)
    [answer] = answers
    assert answer.status_code == 400 and "bytes and cannot fit" in answer.json()["error"]["message"]
    assert longest < 5  # encoding it took a hundred times as long as reading it


def send_headers(address: tuple[str, int], answers: list[bytes]) -> None:
    """One of 64 MiB, on one connection after another; no more of them once one was taken."""
    for _ in range(100):
        is_taken = False
        with suppress(OSError), socket.create_connection(address, timeout=60) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nA: ")
            with suppress(ConnectionError):  # once what was sent is too much
                for _ in range(64):
                    connection.sendall(b"x" * 2**20)
                is_taken = True
            answers.append(connection.recv(65536))
        if is_taken:
            return


def memory_mib(pid: int) -> int:
    [kib] = re.findall(r"^VmRSS:\s*(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return int(kib) >> 10


def test_headers_without_an_end_cost_nobody_anything(served: tuple["subprocess.Popen[str]", httpx.Client]) -> None:
    """One header of many megabytes was copied with every read, for half a minute in which nobody was answered."""
    process, client = served
    answers: list[bytes] = []
    most = before = memory_mib(process.pid)
    longest = 0.0
    given = (client.base_url.host, client.base_url.port), answers
    threads = [threading.Thread(target=send_headers, args=given) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        started = time.monotonic()
        assert client.get("/health").status_code == 200
        longest = max(longest, time.monotonic() - started)
        most = max(most, memory_mib(process.pid))
    assert longest < PATIENCE and most - before < 100
    assert any(answer.startswith(b"HTTP/1.1 431 ") for answer in answers)


def test_web_pages_and_other_places_are_refused(server: httpx.Client, model: Path) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Host": "evil.example"}):
        for path in ("/pause", "/v1/completions", "/update_weights"):
            assert server.post(path, json={}, headers=headers).status_code == 403
    for path in ("/etc", "/nowhere", str(model.parents[1])):
        answer = server.post("/update_weights", json={"path": path, "version": 0})
        assert answer.status_code == 400 and "--server.weight-roots" in answer.json()["error"]["message"]
    assert server.post("/update_weights", json={"path": str(model), "version": 0}).status_code == 200
    name = "a\nforged line \x1b[31m"
    folder = model.parent / name
    shutil.copytree(model, folder)
    assert server.post("/update_weights", json={"path": str(folder), "version": 0}).status_code == 200


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-30, 1e-5, 1e-3, 100])
def test_every_temperature_is_served(server: httpx.Client, temperature: float) -> None:
    body = {"prompt": "abc", "temperature": temperature, "max_tokens": 3, "logprobs": 2, "ignore_eos": True}
    assert server.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("config", ["[]", "7", '{"architectures": 7}'])
def test_files_of_another_shape_are_refused_and_the_old_weights_serve(
    server: httpx.Client, model: Path, config: str
) -> None:
    folder = model.parent / "damaged"
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "manifest.json", "adapter_config.json"):
        (folder / name).write_text(config)
    for version in (0, 1):
        assert server.post("/update_weights", json={"path": str(folder), "version": version}).status_code == 400
    body = {"lora_name": "bad", "lora_path": str(folder)}
    assert server.post("/load_lora_adapter", json=body).status_code == 400
    (folder / "manifest.json").unlink()
    assert server.post("/update_weights", json={"path": str(folder), "version": 0}).status_code == 400
    assert server.post("/load_lora_adapter", json=body).status_code == 400
    assert server.post("/v1/completions", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("name", ["manifest.json", "config.json", "model.safetensors", "adapter_config.json"])
def test_a_pipe_in_the_place_of_a_file_holds_up_nobody(server: httpx.Client, model: Path, name: str) -> None:
    folder = shutil.copytree(model, model.parent / f"pipe {name}")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    version = 1 if name == "manifest.json" else 0
    body = {"path": str(folder), "version": version}
    assert server.post("/update_weights", json=body).status_code == 400
    body = {"lora_name": "bad", "lora_path": str(folder)}
    assert server.post("/load_lora_adapter", json=body).status_code == 400
    assert server.post("/update_weights", json={"path": str(model), "version": 0}).status_code == 200


def test_who_waits_when_the_server_has_to_leave_gets_a_reason(starter: Starter, model: Path) -> None:
    process, client = start(starter, model, "--drain-timeout-s", "0.1", "--max-sequences", "1")
    answers: list[httpx.Response] = []
    with client, client.stream("POST", "/v1/completions", json=LONG | {"stream": True, "n": 40}) as stream:
        lines = (line for line in stream.iter_lines() if line)
        next(lines)
        thread = threading.Thread(target=lambda: answers.append(client.post("/v1/completions", json=LONG)))
        thread.start()
        arrived = "tandem_http_requests_open 3"  # both, and the one that asks
        wait_until(lambda: arrived in client.get("/metrics").text, 60, "the second request to arrive")
        process.send_signal(signal.SIGTERM)
        *_, error, last = lines
        thread.join(60)
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down" and last == "data: [DONE]"
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "shutting_down"
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "Traceback" not in output, output


def truncate(model: Path) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def change_config(**values: Any) -> Any:
    return lambda model: write_json(model / "config.json", read_json(model / "config.json") | values)


@pytest.mark.parametrize(
    ("damage", "options", "expected"),
    [
        (truncate, [], "model.safetensors cannot be read"),
        (lambda model: (model / "model.safetensors").write_bytes(b"x" * 100), [], "model.safetensors cannot be read"),
        (change_config(hidden_size=64), [], "has shape"),
        (change_config(hidden_size="128"), [], "hidden_size = '128' must be a whole number"),
        (change_config(num_hidden_layers=10**9), [], "num_hidden_layers = 1000000000 must be"),
        (lambda model: (model / "config.json").write_text("[]"), [], "config.json must hold a JSON object"),
        (lambda model: (model / "tokenizer.json").write_text("[]"), [], "tokenizer.json cannot be read as a tokenizer"),
        (lambda model: None, ["--seq-len", "513"], "seq_len = 513 is above max_position_embeddings"),
    ],
)
def test_a_model_that_cannot_be_served_is_one_line_and_exit_code_2(
    starter: Starter, tiny_model: Path, tmp_path: Path, damage: Any, options: list[str], expected: str
) -> None:
    shutil.copytree(tiny_model, tmp_path / "model")
    damage(tmp_path / "model")
    port = free_port()
    done = starter.run("inference", "--model.name", str(tmp_path / "model"), "--port", str(port), *options)
    assert done.returncode == 2, done.stdout
    [line] = [line for line in done.stdout.splitlines() if line.startswith("inference: ")]
    assert expected in line and "Traceback" not in done.stdout
