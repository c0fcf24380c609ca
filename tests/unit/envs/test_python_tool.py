"""Python as a tool: what the model's code prints, what it may not do, and what is no answer."""

import asyncio

import pytest
from tests.unit.envs.scripted import Scripted, call, say

from tandem.envs import python_tool
from tandem.envs.python_tool import PythonUse, python
from tandem.envs.tools import ToolUnavailable, call_tool
from tandem.isolation.sandbox import SandboxUnavailable
from tandem.utils.errors import UserError


def run(code: str) -> str:
    return asyncio.run(call_tool(python, {"code": code}))


def test_what_is_printed_or_raised_is_told() -> None:
    assert run("print(sum(range(5)))") == "10\n"
    assert run("x = 1") == "(nothing was printed)"
    assert run("1 / 0") == "Error: ZeroDivisionError: division by zero"


def test_what_it_may_not_do(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Error: " in run("import socket; socket.create_connection(('127.0.0.1', 9))")
    assert "Error: " in run("open('/etc/passwd').read()")
    monkeypatch.setattr(python_tool, "TIMEOUT_S", 1.0)
    assert run("while True: pass").startswith("Error: the script was stopped, it used too much time")


def test_an_episode() -> None:
    environment = PythonUse(num_train=2, num_eval=1)
    task = environment.train_tasks[0]
    model = Scripted(call("python", code=f"print({task.answer})"), say(f"#### {task.answer}"))
    result = asyncio.run(environment.rollout(task, model))
    assert (result.rewards, result.metrics, result.ended) == (1.0, {"tool_calls": 1, "tool_errors": 0}, "answer")
    assert model.asked[1][-1]["content"] == f"{task.answer}\n"


def test_without_a_sandbox_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_tool, "why_unprotected", lambda: "no Landlock")
    with pytest.raises(UserError, match="the model's code cannot be run safely here: no Landlock"):
        PythonUse(num_train=2, num_eval=1)

    async def refuse(code: str, **limits: float) -> None:
        raise SandboxUnavailable("no Landlock")

    monkeypatch.setattr(python_tool, "run_python", refuse)
    with pytest.raises(ToolUnavailable, match="no Landlock"):
        run("print(1)")
