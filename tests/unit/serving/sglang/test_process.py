"""`inference --engine sglang` as a process of its own, and the engine of the Python API, in front of a fake SGLang
server."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.serving.sglang.fake_server import FakeSGLang

from tandem import SGLangEngine, UserError
from tandem.utils.processes import descendants

Start = Callable[..., "subprocess.Popen[str]"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "SGLANG_KEY": "secret"}


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(tiny_model: Path, sglang: FakeSGLang, port: int, tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: str) -> "subprocess.Popen[str]":
        command = [
            *(sys.executable, "-m", "tandem.entrypoints.inference"),
            *("--engine", "sglang", "--sglang.base-url", sglang.url, "--model.name", str(tiny_model)),
            *("--server.port", str(port), "--seq-len", "256", "--server.weight-roots", str(tmp_path), *arguments),
        ]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
        )
        started.append(process)
        return process

    yield run
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def call(port: int, route: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{route}", data, {"Content-Type": "application/json"} if data else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def until_healthy(port: int, process: "subprocess.Popen[str]") -> dict[str, Any]:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            return call(port, "/health")[1]
        except (urllib.error.URLError, TimeoutError):
            time.sleep(0.1)
    raise AssertionError(f"the server did not come up: exit code {process.poll()}")


def test_generation_and_an_update_through_our_server(
    start: Start, sglang: FakeSGLang, port: int, publish: Callable[[int], Path]
) -> None:
    sglang.api_key = "secret"
    sglang.start()
    process = start("--sglang.api-key-var", "SGLANG_KEY")
    assert until_healthy(port, process)["version"] == 0
    body = {"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": True, "logprobs": 1, "return_token_ids": True}
    status, answer = call(port, "/v1/completions", body)
    choice = answer["choices"][0]
    assert status == 200, answer
    assert (choice["token_ids"], choice["weight_versions"]) == ([10, 11, 12], [0, 0, 0])
    assert choice["logprobs"]["token_logprobs"] == [-1.0, -1.001, -1.002]

    status, answer = call(port, "/update_weights", {"path": str(publish(4)), "version": 4})
    assert (status, sglang.label) == (200, "4"), answer
    status, answer = call(port, "/v1/completions", body)
    assert answer["choices"][0]["weight_versions"] == [4, 4, 4]

    status, answer = call(port, "/v1/completions", body | {"seed": 1})
    assert status == 400 and "--enable-deterministic-inference" in answer["error"]["message"]
    status, answer = call(port, "/update_weights", {"path": "/nowhere", "version": 5})
    assert status == 400 and "/nowhere" in answer["error"]["message"]
    assert call(port, "/health")[1]["version"] == 4

    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0


def test_the_wrong_model_ends_with_one_message(start: Start, sglang: FakeSGLang) -> None:
    sglang.model_path = "/models/other"
    sglang.start()
    output, _ = (process := start()).communicate(timeout=300)
    assert process.returncode == 2
    assert "SGLang serves /models/other, not model.name" in output and "Traceback" not in output


def test_nobody_there_ends_with_one_message(start: Start, sglang: FakeSGLang) -> None:
    sglang.url = "http://127.0.0.1:9"
    output, _ = (process := start("--sglang.startup-timeout-s", "0.5")).communicate(timeout=300)
    assert process.returncode == 2
    assert "waited 0.5 s for the SGLang server at http://127.0.0.1:9" in output and "Traceback" not in output


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--max-sequences", "4"], "max_sequences"),
        (["--sglang.base-url", "localhost:1"], "'localhost:1' is not the address of a server"),
        (["--sglang.api-key", "a", "--sglang.api-key-var", "B"], "api_key_var"),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(
    start: Start, sglang: FakeSGLang, arguments: list[str], named: str
) -> None:
    sglang.url = "http://127.0.0.1:9"
    output, _ = (process := start(*arguments)).communicate(timeout=300)
    assert process.returncode == 2 and named in output


LAUNCH_SERVER = """
import signal, sys, threading
from tests.unit.serving.sglang.fake_server import FakeSGLang

if "--crash" in sys.argv:
    sys.exit("out of memory")
given = dict(zip(sys.argv[1::2], sys.argv[2::2]))
server = FakeSGLang(given["--model-path"]).start(int(given["--port"]))
threading.Event().wait()
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package by SGLang's name, whose `launch_server` is the fake one."""
    package = tmp_path / "packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(LAUNCH_SERVER)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package.parent), os.environ.get("PYTHONPATH", "")]))


@pytest.mark.usefixtures("installed")
def test_the_python_api_starts_sglang_and_ends_it(tiny_model: Path, publish: Callable[[int], Path]) -> None:
    async def run() -> None:
        before = set(descendants(os.getpid()))
        async with SGLangEngine(tiny_model, gpu_memory_utilization=0.5, seq_len=256) as engine:
            assert engine.flags == {"mem-fraction-static": 0.5}
            (group,) = await engine.generate(["hello"], n=2, max_tokens=3)
            assert len(group) == 2 and all(group)
            await engine.update_weights(publish(4), 4)
            assert len(set(descendants(os.getpid())) - before) >= 2
        assert set(descendants(os.getpid())) <= before

    asyncio.run(run())


@pytest.mark.usefixtures("installed")
def test_an_sglang_that_crashes_at_its_start_is_not_waited_for(tiny_model: Path) -> None:
    with pytest.raises(UserError, match=r"SGLang ended .*\n.*out of memory"):
        asyncio.run(SGLangEngine(tiny_model, flags={"crash": True}).start())


def test_the_python_api_uses_an_sglang_that_runs(tiny_model: Path, sglang: FakeSGLang) -> None:
    async def run() -> list[list[str]]:
        async with SGLangEngine(tiny_model, sglang_url=sglang.start().url, seq_len=256) as engine:
            return await engine.generate(["hello", "world"], max_tokens=3)

    assert [len(group) for group in asyncio.run(run())] == [1, 1]
    with pytest.raises(UserError, match="this one runs"):
        SGLangEngine(tiny_model, sglang_url=sglang.url, flags={"tp": 2})
