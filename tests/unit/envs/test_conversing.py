"""The loops of a conversation, the guessing game and the simulated user, with a model that says what it is told."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from tests.unit.envs.scripted import Scripted, call, say

from tandem.envs.calculator import CalculatorUse, calculator
from tandem.envs.config import EnvConfig
from tandem.envs.conversing import converse, use_tools
from tandem.envs.guessing import GuessingGame
from tandem.envs.model import ContextFull, Reply
from tandem.envs.registry import make_environment
from tandem.envs.results import Result
from tandem.envs.simulated_user import SimulatedUser
from tandem.types.rollout import Message, Task
from tandem.utils.errors import UserError

QUESTION = [{"role": "user", "content": "q"}]


def test_tools_are_run_until_there_is_an_answer() -> None:
    model = Scripted(
        call("calculator", expression="2+3"), call("divide"), call("calculator", expression="1/0"), say("5")
    )
    played = asyncio.run(use_tools(model, QUESTION, [calculator]))
    results = [message["content"] for message in played.messages if message["role"] == "tool"]
    assert results == ["5", "Error: no tool 'divide'", "Error: division by zero"]
    assert (played.text, played.ended, played.metrics) == ("5", "answer", {"tool_calls": 3, "tool_errors": 2})


@pytest.mark.parametrize(
    ("replies", "ended"),
    [
        ([call("calculator", expression="1")] * 2, "max_turns"),
        ([call("calculator", expression="1"), ContextFull("full")], "context_full"),
        ([Reply({"role": "assistant", "content": "and so"}, "length")], "length"),
    ],
)
def test_why_a_conversation_ends(replies: list[Reply | Exception], ended: str) -> None:
    assert asyncio.run(use_tools(Scripted(*replies), QUESTION, [calculator], max_turns=2)).ended == ended


def test_a_user_who_waits() -> None:
    async def user(messages: list[Message]) -> str | None:
        await asyncio.sleep(0)
        return "more" if len(messages) < 4 else None

    played = asyncio.run(converse(Scripted(say("a"), say("b")), QUESTION, user))
    assert [message["content"] for message in played.messages] == ["q", "a", "more", "b"]
    assert played.ended == "user"


def episode(environment: Any, *replies: Reply, task: Task | None = None) -> Result:
    return asyncio.run(environment.rollout(task or environment.train_tasks[0], Scripted(*replies)))


def test_the_calculator_environment() -> None:
    environment = CalculatorUse(num_train=3, num_eval=2, operators=["-"])
    task = environment.train_tasks[0]
    right = episode(environment, call("calculator", expression=task.messages[0]["content"]), say(f" {task.answer}\n"))
    assert right == Result(1.0, {"tool_calls": 1, "tool_errors": 0}, "answer")
    assert episode(environment, say("x")).rewards == 0.0
    with pytest.raises(UserError, match="operators: '/' is not one of"):
        make_environment(EnvConfig(id="calculator", args={"operators": ["/"]}))


def test_the_guessing_game() -> None:
    environment = GuessingGame(max_number=9, max_turns=4, num_train=1, num_eval=1)
    task = Task(0, QUESTION, "6")
    model = Scripted(say("hm"), say("Is it 8?"), say("3"), say("6!"))
    result = asyncio.run(environment.rollout(task, model))
    assert [message["content"] for message in model.asked[-1][2::2]] == ["Say a number.", "lower", "higher"]
    assert result == Result(0.25, {"guesses": 4}, "found")
    assert episode(environment, say("6"), task=task).rewards == 1.0
    lost = episode(environment, *[say("1")] * 4, task=task)
    assert (lost.rewards, lost.ended) == (0.0, "max_turns")


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_user_with_a_script(tmp_path: Path) -> None:
    row = {"prompt": "hello", "answer": "bye", "script": ["are you sure?", "then bye"]}
    environment = SimulatedUser(path=write_rows(tmp_path / "chats.jsonl", row, row), held_out=1)
    model = Scripted(say("hi"), say("yes"), say("bye"))
    result = asyncio.run(environment.rollout(environment.train_tasks[0], model))
    assert (result.rewards, result.ended) == (1.0, "user")
    assert [message["content"] for message in model.asked[-1]] == ["hello", "hi", "are you sure?", "yes", "then bye"]


@pytest.mark.parametrize("row", [{"script": "no list"}, {"persona": "in a hurry"}, {}])
def test_a_user_who_has_nothing_to_say_is_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    rows = [{"prompt": "hello", "answer": "bye"} | row] * 2
    args = {"path": write_rows(tmp_path / "chats.jsonl", *rows), "held_out": 1}
    with pytest.raises(UserError, match=r"task 0.*'script'"):
        make_environment(EnvConfig(id="simulated-user", args=args))


def test_a_user_behind_an_endpoint(tmp_path: Path) -> None:
    """The endpoint sees the conversation from the user's side, and ends it."""
    asked: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        text = "what is it?" if len(asked) == 1 else "DONE."
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})

    async def run() -> Result:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        row = {"prompt": "hello", "answer": "bye", "persona": "in a hurry"}
        environment = SimulatedUser(
            path=write_rows(tmp_path / "chats.jsonl", row, row), held_out=1, base_url=f"http://127.0.0.1:{port}/v1"
        )
        environment.setup()
        try:
            return await environment.rollout(environment.train_tasks[0], Scripted(say("hi"), say("bye")))
        finally:
            await environment.close()
            await runner.cleanup()

    result = asyncio.run(run())
    assert (result.rewards, result.ended) == (1.0, "user")
    assert [(message["role"], message["content"]) for message in asked[1]["messages"][1:]] == [
        ("assistant", "hello"),
        ("user", "hi"),
        ("assistant", "what is it?"),
        ("user", "bye"),
    ]
    assert asked[0]["messages"][0]["content"].endswith("The user: in a hurry")
