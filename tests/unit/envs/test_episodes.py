"""Conversations in the environment's process: the model is asked over the wire, and whatever an episode does costs
that episode alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tandem.envs.config import EnvConfig
from tandem.envs.model import ChatRefused
from tandem.envs.process import EnvironmentProcess, open_environment
from tandem.envs.results import Result
from tandem.envs.trial import try_environment
from tandem.isolation.failures import Failure, UserCodeError
from tandem.types.rollout import Message
from tandem.utils.errors import UserError

LIMIT_S = 2.0

pytestmark = pytest.mark.usefixtures("importable")


class Speaker:
    """A model that says one letter more at each turn, or takes its time, or fails."""

    def __init__(self, delay_s: float = 0.0, error: Exception | None = None) -> None:
        self.delay_s = delay_s
        self.error = error
        self.num_restarts = 0

    def restart(self) -> None:
        self.num_restarts += 1
        self.asked: list[list[Message]] = []

    async def chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, max_tokens: int | None
    ) -> dict[str, Any]:
        self.asked.append(messages)
        await asyncio.sleep(self.delay_s)
        if self.error is not None:
            raise self.error
        if not all("role" in message for message in messages):
            raise ChatRefused("message 0 needs 'role' as text")
        return {"message": {"role": "assistant", "content": "y" * len(self.asked)}, "finish_reason": "stop"}


def config(*behaviours: str, cls: str = "Playing", **options: object) -> EnvConfig:
    args = {"behaviours": list(behaviours)}
    limits = {"turn_timeout_s": LIMIT_S, "episode_timeout_s": 60.0}
    return EnvConfig.model_validate({"id": f"playing:{cls}", "args": args} | limits | options)


def play(env: EnvConfig, *speakers: Speaker) -> list[Result | Failure | Exception]:
    """What the episode of each training task comes to, played at the same time; a good one must work after that."""

    async def run() -> list[Result | Failure | Exception]:
        async with open_environment(env) as environment:
            tasks = environment.train_tasks
            players = speakers or [Speaker() for _ in tasks]
            episodes = [environment.play(task, player) for task, player in zip(tasks, players, strict=True)]
            outcomes = await asyncio.gather(*episodes, return_exceptions=True)
            again = await environment.play(environment.eval_tasks[0], Speaker())
            assert again.rewards == {"length": 2.0, "constant": 0.5}
            return [outcome.failure if isinstance(outcome, UserCodeError) else outcome for outcome in outcomes]  # pyright: ignore[reportReturnType]

    return asyncio.run(run())


def test_an_episode_is_a_conversation_with_the_model() -> None:
    speaker = Speaker()
    (result,) = play(config("good"), speaker)
    assert result == Result({"length": 2.0, "constant": 0.5}, {"turns_played": 2.0}, "said_enough")
    first: Message = {"role": "user", "content": "x"}
    assert speaker.asked == [
        [first],
        [first, {"role": "assistant", "content": "y"}, {"role": "user", "content": "and then"}],
    ]


class Caller(Speaker):
    """A model that calls a tool with these arguments, and then says what it was told."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments

    async def chat(
        self, messages: list[Message], tools: list[dict[str, Any]] | None, max_tokens: int | None
    ) -> dict[str, Any]:
        reply = await super().chat(messages, tools, max_tokens)
        if len(self.asked) == 2:
            function = {"name": "add", "arguments": self.arguments}
            reply["message"]["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
        return reply


def test_arguments_of_tools_come_over_whatever_their_size() -> None:
    large, half = Caller({"a": 10**30}), Caller({"a": 1, "\ud83d": 1})
    assert [isinstance(result, Result) for result in play(config("tools", "tools"), large, half)] == [True, True]
    assert large.asked[-1][-1]["content"] == str(10**30 + 1)
    assert half.asked[-1][-1]["content"].startswith("Error: ")


def test_a_turn_that_cannot_be_written_ends_its_episode() -> None:
    (outcome,) = play(config("tools"), Caller({"a": object()}))
    assert isinstance(outcome, TypeError)


def test_an_episode_that_changes_the_messages_of_its_task_changes_them_for_itself_alone() -> None:
    async def run() -> list[Speaker]:
        speakers = [Speaker(delay_s=0.05) for _ in range(3)]
        async with open_environment(config("appends")) as environment:
            (task,) = environment.train_tasks
            await asyncio.gather(*(environment.play(task, speaker) for speaker in speakers[:2]))
            await environment.play(task, speakers[2])
        return speakers

    for speaker in asyncio.run(run()):
        assert speaker.asked == [
            [{"role": "user", "content": "x"}],
            [{"role": "user", "content": "x!"}, {"role": "assistant", "content": "y"}],
        ]


def test_what_is_no_result_costs_its_episode_and_says_where() -> None:
    behaviours = ["raises", "nan", "none", "text", "nan by name", "empty", "bad metric", "no metric", "bad end"]
    outcomes = play(config("by turn", *behaviours, "bad turn", "no turns", "bad messages", "explodes"))
    assert outcomes[0] == Result(1.0, {}, "done", [0.25])
    failures = [outcome for outcome in outcomes[1:] if isinstance(outcome, Failure)]
    assert [failure.reason.partition(";")[0] for failure in failures] == [
        "LookupError: nothing there",
        "the reward is nan",
        "the reward is None, not a number",
        "the reward is '1.0', not a number",
        "bad: the reward is nan",
        "there are no rewards: the table of them is empty",
        "metrics.share = inf is not a finite number",
        "metrics.share = None is not a finite number",
        "ended = '' is not a word",
        "turn_rewards: the reward is nan",
        "turn_rewards: 'float' object is not iterable",
        "ChatRefused: message 0 needs 'role' as text",
        "ArithmeticError: boom",
    ]
    assert all(failure.where.startswith("playing.py:") for failure in failures)


def test_a_turn_that_waits_or_blocks_too_long_costs_its_episode() -> None:
    waits, blocks, good = play(config("waits", "blocks", "good"))
    assert isinstance(good, Result)
    for failure in (waits, blocks):
        assert isinstance(failure, Failure) and failure.fault == "time" and failure.where.startswith("playing.py:")
        assert "env.turn_timeout_s = 2 s between turns of the model" in failure.reason


def test_the_time_of_the_model_is_not_the_environments() -> None:
    (result,) = play(config("good", turn_timeout_s=2.0), Speaker(delay_s=2.5))
    assert isinstance(result, Result)


def test_an_episode_ends_at_its_limit() -> None:
    (failure,) = play(config("asks for ever", episode_timeout_s=3.0), Speaker(delay_s=0.05))
    assert isinstance(failure, Failure) and "env.episode_timeout_s = 3 s" in failure.reason


def test_a_server_that_fails_is_no_fault_of_the_environment() -> None:
    (error,) = play(config("good"), Speaker(error=ConnectionError("the server is gone")))
    assert isinstance(error, ConnectionError)


def test_an_episode_that_is_called_off_ends_in_its_process(tmp_path: Path) -> None:
    """Its turn is never answered; what it waits for is cancelled there, and the process goes on."""

    async def run() -> None:
        async with open_environment(config("good")) as environment:
            speaker = Speaker(delay_s=1000)
            episode = asyncio.ensure_future(environment.play(environment.train_tasks[0], speaker))
            while not getattr(speaker, "asked", None):
                await asyncio.sleep(0.01)
            worker = environment._process.worker
            episode.cancel()
            while worker._calls:
                await asyncio.sleep(0.01)
            assert environment._process.worker is worker and not worker.is_lost

    asyncio.run(run())


def test_set_up_and_closed_once(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    env = config("good").model_copy(update={"args": {"behaviours": ["good"], "trace": str(trace)}})
    play(env)
    assert trace.read_text() == "setup\nclose\n"


def test_tasks_say_that_they_are_played_and_with_which_tools() -> None:
    async def run() -> EnvironmentProcess:
        async with open_environment(config("good")) as environment:
            return environment

    (task,) = asyncio.run(run()).train_tasks
    assert task.is_interactive and task.tools is not None
    assert task.tools[0]["function"]["name"] == "add"


def try_it(env: EnvConfig) -> None:
    async def run() -> None:
        async with open_environment(env) as environment:
            await try_environment(environment, env)

    asyncio.run(run())


def test_an_episode_is_tried_before_anything_starts() -> None:
    try_it(config("good"))
    played = "playing training task 0 with a model that says nothing failed"
    with pytest.raises(UserError, match=rf"{played}: LookupError: nothing there \(playing\.py:"):
        try_it(config("raises"))
    with pytest.raises(UserError, match=r"the episode does not end: .* more than 2000 turns, which always said ''"):
        try_it(config("asks for ever"))


def test_a_rollout_that_is_not_async_is_refused() -> None:
    with pytest.raises(UserError, match="rollout must be `async def`"):
        try_it(config("good", cls="NotAsync"))


def test_another_reward_scores_what_was_said_last() -> None:
    async def run() -> Result:
        async with open_environment(config("good", reward="exact_match", system_prompt="Be brief.")) as environment:
            (task,) = environment.train_tasks
            return await environment.play(task, Speaker())

    assert asyncio.run(run()) == Result(0.0, {"turns_played": 2.0}, "said_enough")
