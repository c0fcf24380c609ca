"""The official OpenAI client and lm-eval, unmodified, against the real server."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.clients import (
    Address,
    check_openai_async,
    check_openai_chat,
    check_openai_completions,
    check_openai_enforced_tools,
    check_openai_errors,
    check_openai_structured,
    check_openai_token_extras,
    check_openai_tools,
    run_lm_eval,
)
from tests.integration.processes import Starter
from tests.integration.servers import wait_until_healthy
from tests.ports import free_port
from tests.scripted_model import write_scripted_model

KEY = "correct-horse"


def serve(model: Path) -> Iterator[Address]:
    starter = Starter()
    starter.environment["TANDEM_TEST_KEY"] = KEY
    port = free_port()
    base_url = f"http://127.0.0.1:{port}"
    process = starter.start(
        "inference",
        *("--model.name", str(model), "--port", str(port), "--api-key-var", "TANDEM_TEST_KEY"),
        *("--seq-len", "512", "--threads", "1"),
    )
    try:
        wait_until_healthy(process, base_url)
        yield Address(base_url, str(model), KEY)
    finally:
        starter.end_all()


@pytest.fixture(scope="module")
def smollm2(smollm2_model: Path) -> Iterator[Address]:
    yield from serve(smollm2_model)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Address]:
    yield from serve(write_scripted_model(tmp_path_factory.mktemp("scripted") / "model"))


CHECKS = [
    check_openai_completions,
    check_openai_chat,
    check_openai_async,
    check_openai_token_extras,
    check_openai_errors,
    check_openai_structured,
]


@pytest.mark.parametrize("check", CHECKS)
def test_openai_client(smollm2: Address, check) -> None:
    check(smollm2)


def test_openai_client_with_tools(scripted: Address) -> None:
    check_openai_tools(scripted)


def test_openai_client_with_enforced_tools(scripted: Address) -> None:
    check_openai_enforced_tools(scripted)


def test_lm_eval_completions(smollm2: Address, tmp_path: Path) -> None:
    assert run_lm_eval(smollm2, "tandem_capitals", tmp_path, chat=False)["acc,none"] >= 0.75


def test_lm_eval_chat(smollm2: Address, tmp_path: Path) -> None:
    result = run_lm_eval(smollm2, "tandem_capitals_written", tmp_path, chat=True)
    assert result["exact_match,first_capital"] >= 0.5
