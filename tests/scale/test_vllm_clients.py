"""The official OpenAI client and lm-eval, unmodified, against `inference --engine vllm`.

Two models, whose servers start side by side: SmolLM2, which knows its capitals, and the scripted one, which calls
tools.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.clients import (
    Address,
    check_openai_async,
    check_openai_chat,
    check_openai_completions,
    check_openai_errors,
    check_openai_structured,
    check_openai_token_extras,
    check_openai_tools,
    run_lm_eval,
)
from tests.ports import free_port
from tests.scale.vllm_server import KEY, VllmServer, begin, wait_until_ready
from tests.scripted_model import write_scripted_model

TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


@pytest.fixture(scope="module")
def servers(
    vllm_python: Path, smollm2_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Address]]:
    folder = tmp_path_factory.mktemp("vllm")
    models = {"smollm2": smollm2_model, "scripted": write_scripted_model(folder / "scripted")}
    options = {"smollm2": (), "scripted": TOOLS}
    addresses: dict[str, Address] = {}
    started: list[VllmServer] = []
    try:
        for name, model in models.items():
            port = free_port()
            started.append(begin(vllm_python, model, folder / f"{name}.log", port, *options[name]))
            addresses[name] = Address(f"http://127.0.0.1:{port}", str(model), KEY)
        wait_until_ready(started)
        yield addresses
    finally:
        for server in started:
            server.end()


@pytest.fixture
def smollm2(servers: dict[str, Address]) -> Address:
    return servers["smollm2"]


@pytest.fixture
def scripted(servers: dict[str, Address]) -> Address:
    return servers["scripted"]


CHECKS = [
    check_openai_completions,
    check_openai_chat,
    check_openai_async,
    check_openai_token_extras,
    check_openai_errors,
    check_openai_structured,
]


@pytest.mark.parametrize("check", CHECKS)
def test_openai_client(smollm2: Address, check: Callable[[Address], None]) -> None:
    check(smollm2)


def test_openai_client_with_tools(scripted: Address) -> None:
    check_openai_tools(scripted)


def test_lm_eval_completions(smollm2: Address, tmp_path: Path) -> None:
    result = run_lm_eval(smollm2, "tandem_capitals", tmp_path, chat=False, tokenizer=smollm2.model)
    assert result["acc,none"] >= 0.75
