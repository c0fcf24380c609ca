"""The examples of docs/environments.md: Python that runs, and TOML that is a configuration."""

import asyncio
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.documentation import FENCE, ROOT
from tests.unit.envs.scripted import Scripted, call, say

from tandem.commands.rl import RLConfig
from tandem.envs.config import EnvConfig
from tandem.envs.registry import make_environment
from tandem.envs.results import Result

PAGE = (ROOT / "docs" / "environments.md").read_text()
BLOCKS = FENCE.findall(PAGE)
TOML = [block for language, block in BLOCKS if language == "toml"]


@pytest.fixture
def module(tmp_path: Path) -> Iterator[str]:
    """All Python of the page, in one file."""
    path = tmp_path / "examples_of_the_page.py"
    path.write_text("\n".join(block for language, block in BLOCKS if language == "python"))
    yield str(path)
    sys.modules.pop(path.stem, None)
    sys.path.remove(str(tmp_path))


def make(module: str, name: str, **options: Any) -> Any:
    return make_environment(EnvConfig(id=f"{module}:{name}", **options))


def test_single_turns(module: str) -> None:
    adds = make(module, "adds", args={"max_number": 4})
    assert len(adds.train_tasks) + len(adds.eval_tasks) == 25
    assert adds.score(adds.train_tasks[0], adds.train_tasks[0].answer) == 1.0
    echo = make(module, "Echo", args={"num_tasks": 20})
    assert asyncio.run(echo.score(echo.train_tasks[3], "3")) == 1.0
    brief = make(module, "Echo", reward=f"{module}:brief")
    assert brief.score(brief.train_tasks[3], "3") == 0.99


def test_a_conversation(module: str) -> None:
    environment = make(module, "SecondThoughts")
    task = environment.train_tasks[0]
    model = Scripted(say("7"), say(task.answer))
    result = asyncio.run(environment.rollout(task, model))
    assert result == Result({"first": 0.0, "second": 0.5}, {"changed": True}, "answered")
    assert model.asked[1][-1]["content"] == "Are you sure?"


def test_tools(module: str) -> None:
    environment = make(module, "Cities")
    model = Scripted(call("population", city="Rome"), say("2750 thousand"))
    result = asyncio.run(environment.rollout(environment.train_tasks[0], model))
    assert (result.rewards, result.metrics["tool_calls"]) == (1.0, 1)


@pytest.mark.parametrize("text", TOML, ids=[block.split("\n")[1] for block in TOML])
def test_configurations(text: str) -> None:
    config = RLConfig.model_validate({"model": {"name": "m"}} | tomllib.loads(text))
    assert config.orchestrator.envs or config.orchestrator.env.id in text
