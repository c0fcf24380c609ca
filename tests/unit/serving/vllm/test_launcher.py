"""vLLM serves on the socket that `inference` has listened on; it runs in another process, which exec has become."""

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.ports import free_port

from tandem.config.inference import InferenceConfig
from tandem.serving.vllm import serve
from tandem.serving.vllm.installation import Installation
from tandem.serving.vllm.settings import Settings
from tandem.utils.errors import UserError
from tandem.utils.ports import LISTENING_FD, listen, listen_or_refuse

# As in vLLM: the function that makes the socket lies beside `setup_server`, which is wrapped and used elsewhere.
FAKE_VLLM = {
    "vllm/entrypoints/cli/main.py": "from vllm.entrypoints.cli.serve import setup_server\n"
    "def main():\n    print(setup_server().getsockname()[1])",
    "vllm/entrypoints/cli/serve.py": "from vllm.sockets import setup_server",
    "vllm/sockets.py": "import functools, socket\n"
    "def create_server_socket(address, **options):\n    return socket.create_server(('127.0.0.1', 0))\n"
    "def instrument(function):\n    return functools.wraps(function)(lambda: function())\n"
    "@instrument\ndef setup_server():\n    return create_server_socket(('127.0.0.1', 1)OPTIONS)",
}

# As vLLM starts uvicorn: by names, which are looked up after the launcher has done its part.
FAKE_SERVER = """
import asyncio, uvicorn
from uvicorn.server import ServerState
def main():
    config = uvicorn.Config(print)
    config.load()
    protocol = config.http_protocol_class(config, ServerState(), {}, asyncio.new_event_loop())
    print(type(protocol).__name__, protocol.receive_timeout_s)
"""

SETTINGS = Settings(Path("model"), "model", None, 1000, 60.0, (), frozenset()).to_environment()


@pytest.fixture
def port() -> int:
    return free_port()


def launch(
    folder: Path,
    environment: dict[str, str],
    descriptors: list[int],
    socket_options: str = ", reuse_port=False",
    **modules: str,
) -> str:
    for name, text in (FAKE_VLLM | {f"vllm/entrypoints/cli/{name}.py": text for name, text in modules.items()}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("OPTIONS", socket_options))
    path = os.pathsep.join([str(folder), *sys.path])
    return subprocess.run(
        [sys.executable, "-m", "tandem.serving.vllm.launcher"],
        env=os.environ | SETTINGS | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "INFO"} | environment,
        pass_fds=descriptors,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.strip()


@pytest.mark.parametrize("socket_options", [", reuse_port=False", ""], ids=["0.32", "0.24"])
def test_vllm_serves_on_the_socket_it_is_given(tmp_path: Path, port: int, socket_options: str) -> None:
    with listen("127.0.0.1", port) as listening:
        number = listening.fileno()
        assert launch(tmp_path, {LISTENING_FD: str(number)}, [number], socket_options) == str(port)
    assert launch(tmp_path, {}, []) != str(port)


def test_its_connections_are_bounded_as_ours(tmp_path: Path) -> None:
    assert launch(tmp_path, {}, [], main=FAKE_SERVER) == "BoundedProtocol 60.0"


def test_the_port_is_held_while_vllm_is_started(
    tmp_path: Path, tiny_model: Path, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = InferenceConfig.model_validate(
        {"engine": "vllm", "model": {"name": tiny_model}, "server": {"port": port}, "seq_len": 64}
    )
    monkeypatch.setattr(serve, "check_vllm", lambda config: Installation(Path(sys.executable), "0.32.0", True))
    started: list[str] = []
    held: list[socket.socket] = []

    def hold(*address: Any) -> socket.socket:
        held.append(listen_or_refuse(*address))
        return held[-1]

    def become(path: str, command: list[str], environment: dict[str, str]) -> None:
        descriptor = int(environment[LISTENING_FD])
        assert os.get_inheritable(descriptor)
        started.append(launch(tmp_path, {LISTENING_FD: str(descriptor)}, [descriptor]))
        with pytest.raises(UserError, match=rf"server\.port = {port} cannot be bound"):
            serve.become_server(config)

    monkeypatch.setattr(serve, "listen_or_refuse", hold)
    monkeypatch.setattr(os, "execve", become)
    serve.become_server(config)
    held[0].close()
    assert started == [str(port)]
