"""A real `inference --engine vllm`, started as a user starts it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tests.integration.processes import is_alive, wait_until
from tests.patience import PATIENCE
from tests.ports import free_port
from tests.scale.hosts import Host

KEY = "correct-horse"
SEQ_LEN = 512
T = TypeVar("T")
START_S = 420 * PATIENCE
# Without the warm-up for compiled shapes, which eager mode has no use for.
EAGER = {"VLLM_CPU_CI_ENV": "1"}
# With the worker in the engine's process: that spares a third of what a server takes to start.
QUICK = EAGER | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
TRIES = 20  # on a busy machine requests may have ended before an update arrives; then they are sent again


@dataclass
class VllmServer:
    process: subprocess.Popen[bytes]
    http: httpx.Client
    log: Path

    def complete(self, **body: Any) -> list[dict[str, Any]]:
        """The choices of a completion with everything the orchestrator asks for."""
        answer = self.http.post("/v1/completions", json={"logprobs": 0, "return_token_ids": True} | body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    def update(self, path: Path, version: int, mode: str = "keep") -> None:
        answer = self.http.post("/update_weights", json={"path": str(path), "version": version, "mode": mode})
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"version": version}

    def health(self) -> dict[str, Any]:
        return self.http.get("/health").json()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60 * PATIENCE)

    def end(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def start(
    python: Path, model_dir: Path, log: Path, *options: str, environment: Mapping[str, str] = QUICK
) -> VllmServer:
    """Start and wait until it answers."""
    started = begin(python, model_dir, log, free_port(), *options, environment=environment)
    wait_until_ready([started])
    return started


def begin(
    python: Path, model_dir: Path, log: Path, port: int, *options: str, environment: Mapping[str, str] = QUICK
) -> VllmServer:
    """Start without waiting: most of the time goes into imports, and two servers may take it side by side."""
    process = launch(python, model_dir, log, "--port", str(port), *options, environment=environment)
    http = httpx.Client(
        base_url=f"http://127.0.0.1:{port}",
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=120 * PATIENCE,
        trust_env=False,
        limits=httpx.Limits(max_connections=None),
    )
    return VllmServer(process, http, log)


def launch(
    python: Path,
    model_dir: Path,
    log: Path,
    *options: str,
    environment: Mapping[str, str] = QUICK,
    host: Host | None = None,
) -> subprocess.Popen[bytes]:
    """`host`: on which of two; left out, on this machine itself."""
    command = [
        *(sys.executable, "-m", "tandem.entrypoints.inference", "--engine", "vllm", "--vllm.python", str(python)),
        *("--model.name", str(model_dir), "--server.api-key-var", "TANDEM_TEST_KEY", "--seq-len", str(SEQ_LEN)),
        *("--max-sequences", "32", "--tokens-per-step", "1024", "--threads", "1", *options),
        *(["--enforce-eager"] if environment.items() >= EAGER.items() else []),
        *("--server.weight-roots", str(model_dir.parents[1])),
    ]
    variables = os.environ | {"TANDEM_TEST_KEY": KEY, "VLLM_HOST_IP": "127.0.0.1", **environment}
    if host is not None:
        command = host.command(command)
        variables |= {"VLLM_HOST_IP": host.address, "GLOO_SOCKET_IFNAME": "eth0"}
    with log.open("ab") as output:
        return subprocess.Popen(command, stdout=output, stderr=output, env=variables, start_new_session=True)


def wait_until_ready(servers: Sequence[VllmServer], others: Sequence[subprocess.Popen[bytes]] = ()) -> None:
    deadline = time.monotonic() + START_S
    for server in servers:
        while True:
            try:
                if server.http.get("/health").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
            ended = [process for process in (server.process, *others) if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                server.end()
                raise AssertionError(f"the server did not start:\n{server.log.read_text()[-5000:]}")


def num_generated(server: VllmServer) -> float:
    """Tokens that vLLM has computed since its start, over all of its engines."""
    lines = server.http.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:generation_tokens_total"))


def send_until_running(server: VllmServer, send: Callable[[], list[Future[T]]]) -> list[Future[T]]:
    """Requests of which vLLM has computed a first token; if all ended before that was seen, they are sent again.

    The others may still wait to be computed: an update that comes now may find them before their first token.
    """
    before = num_generated(server)
    futures = send()

    def is_running() -> bool:
        nonlocal futures, before
        if all(future.done() for future in futures):
            before = num_generated(server)
            futures = send()
        return num_generated(server) > before

    wait_until(is_running, 60, "vLLM to run a request")
    return futures


def descendants(pid: int) -> set[int]:
    """All processes below `pid`."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def wait_until_gone(pids: set[int], timeout_s: float = 10) -> None:
    """The last to leave, Python's resource tracker, does so a moment after everybody else."""
    deadline = time.monotonic() + timeout_s * PATIENCE
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.1)
