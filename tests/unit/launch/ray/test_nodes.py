"""Addresses of Ray clusters that cannot be: told at once, where Ray would try for minutes."""

import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
from tests.ports import free_port

from tandem.launch.ray import nodes
from tandem.utils.errors import UserError


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("10.0.0.1", "is neither 'auto' nor HOST:PORT"),
        ("local", "is neither 'auto' nor HOST:PORT"),
        ("127.0.0.1:FREE", r"no Ray cluster answers there \(.*refused"),
        ("127.0.0.1:99999", "no Ray cluster answers there"),
    ],
)
def test_an_address_where_nothing_is_is_refused(address: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "import_ray", lambda: SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(UserError, match=message):
        nodes.connect(address.replace("FREE", str(free_port())))


def test_a_cluster_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(command: list[str], *, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", wait)
    with pytest.raises(UserError, match=r"ray.address = '10.0.0.1:6379': what is there has not answered for 120 s"):
        nodes.ask_nodes("10.0.0.1:6379")
