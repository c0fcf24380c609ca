"""Episodes are played before anything starts, through the conversation that a run would have with the model."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.commands.orchestrator import OrchestratorConfig
from tandem.data.tokenizer import Tokenizer
from tandem.envs.mixture import open_environments
from tandem.envs.process import HeldTask
from tandem.envs.results import Result
from tandem.isolation.failures import UserCodeError
from tandem.orchestrator.conversations import ChatFormat, Conversation
from tandem.orchestrator.rehearsal import Rehearsal, ScriptedPolicy, try_environments
from tandem.types.rollout import Completion, SamplingRequest
from tandem.utils.errors import UserError

OWN = """\
from tandem.envs.conversing import converse
from tandem.envs.results import Result
from tandem.types.rollout import Task

MORE = {"role": "user", "content": "more"}

def add(a: int, b: int) -> int: return a + b

class Good:
    def __init__(self):
        self.train_tasks = [Task(3, [{"role": "user", "content": "q"}], "an answer")]
        self.eval_tasks = self.train_tasks

    async def rollout(self, task, model):
        first = await model.chat(task.messages)
        await model.chat([*task.messages, first.message, MORE], max_tokens=4)
        return Result(1.0, turn_rewards=[0.5, 0.25])

class Ends(Good):
    async def rollout(self, task, model):
        return (await converse(model, task.messages, lambda messages: "more", max_turns=1000)).result(1.0)

class NoTurn(Good):
    async def rollout(self, task, model): return 1.0

class TurnRewards(Good):
    async def rollout(self, task, model):
        await model.chat(task.messages)
        return Result(1.0, turn_rewards=[0.5, 0.25])

class Text(Good):
    async def rollout(self, task, model): return len((await model.chat("q")).text)

class NoRole(Good):
    async def rollout(self, task, model): return len((await model.chat([{"content": "q"}])).text)

class NumberContent(Good):
    async def rollout(self, task, model): return len((await model.chat([{"role": "user", "content": 5}])).text)

class TextTokens(Good):
    async def rollout(self, task, model): return len((await model.chat(task.messages, max_tokens="5")).text)

class NumpyTokens(Good):
    async def rollout(self, task, model):
        import numpy as np
        return len((await model.chat(task.messages, max_tokens=np.int64(5))).text)

class Tools(Good):
    async def rollout(self, task, model): return len((await model.chat(task.messages, tools=[add])).text)

class Grows(Good):
    async def rollout(self, task, model):
        messages = task.messages
        while True:
            messages = [*messages, (await model.chat(messages)).message, MORE]

class CutOff(Good):
    async def rollout(self, task, model):
        assert (await model.chat(task.messages)).finish_reason == "stop", "cut off"
        return 1.0
"""


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "played_of_a_test.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("played_of_a_test", None)


def rehearse(name: str, tiny_model: Path) -> None:
    env = {"id": f"./played_of_a_test.py:{name}"}
    tree = {"model": {"name": tiny_model}, "seq_len": 128, "sampling": {"max_tokens": 8}, "env": env}
    config = OrchestratorConfig.model_validate(tree)

    async def run() -> None:
        async with open_environments(config.plans) as environment:
            await try_environments(environment, config, Tokenizer(tiny_model))

    asyncio.run(run())


def test_the_model_always_says_the_same_as_far_as_there_is_room(tiny_model: Path) -> None:
    tokenizer = Tokenizer(tiny_model)
    tokenizer.eos_token_ids = [*tokenizer.eos_token_ids, 0]  # any of them ends a turn
    policy, expected = ScriptedPolicy(tokenizer, "abc"), [*tokenizer.encode("abc"), tokenizer.eos_token_ids[0]]

    async def say(max_tokens: int) -> Completion:
        [completion] = await policy.generate([1], SamplingRequest(1, max_tokens, 1.0, seed=0))
        return completion

    for max_tokens in (4, 5):
        assert asyncio.run(say(max_tokens)) == Completion(expected, [-1.0] * 4, [0] * 4, "stop")
    assert asyncio.run(say(3)) == Completion(expected[:3], [-1.0] * 3, [0] * 3, "length")


def test_an_episode_that_does_not_end_is_cut_short(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.envs.trial.MAX_TURNS", 3)
    policy = ScriptedPolicy(Tokenizer(tiny_model), "abc")

    async def ask() -> None:
        for _ in range(4):
            await policy.generate([1], SamplingRequest(1, 8, 1.0, seed=0))

    with pytest.raises(UserCodeError, match="asked the model for more than 3 turns, which always said 'abc'"):
        asyncio.run(ask())


def test_turns_are_as_long_and_as_warm_as_those_of_the_run(tiny_model: Path) -> None:
    config = OrchestratorConfig.model_validate(
        {"model": {"name": tiny_model}, "sampling": {"max_tokens": 8, "temperature": 0.5}}
    )
    asked: list[SamplingRequest] = []

    class Environment:
        async def play(self, task: HeldTask, player: Conversation) -> Result:
            asked.append(player.sampling)
            await player.chat([{"role": "user", "content": "q"}], None, None)
            return Result(1.0)

    environment: Any = Environment()
    play = Rehearsal(environment, ChatFormat(Tokenizer(tiny_model), 64), config.plans[""])
    asyncio.run(play(HeldTask(3, [], "", is_interactive=True), "a"))
    assert asked == [SamplingRequest(n=1, max_tokens=8, temperature=0.5, seed=0)]


@pytest.mark.parametrize("name", ["Good", "Ends", "NumpyTokens"])
def test_an_episode_that_ends_with_a_reward_passes(tiny_model: Path, name: str) -> None:
    rehearse(name, tiny_model)


@pytest.mark.parametrize(
    ("name", "said", "reason"),
    [
        ("NoTurn", "nothing", r"the episode ended before the model had a turn; let every episode end with a reward"),
        ("TurnRewards", "nothing", r"turn_rewards has 2 numbers; the model had 1 turns"),
        ("Text", "nothing", r"ValueError: model\.chat\('q'\) is text; give a list of messages .*_of_a_test\.py:32 in"),
        ("NoRole", "nothing", r"ChatRefused: message 0 of 'messages' needs 'role' as text; it has None"),
        ("NumberContent", "nothing", r"ChatRefused: message 0 of 'messages': 'content' must be text, .* it is 5"),
        ("TextTokens", "nothing", r"ValueError: max_tokens = '5' of model\.chat is no positive int"),
        ("Tools", "nothing", r"ChatRefused: tools cannot be used with this model: .* template has no tools"),
        ("Grows", "nothing", r"ContextFull: the conversation has \d+ tokens, which leaves no room in seq_len = 128"),
        ("CutOff", "its answer", r"AssertionError: cut off"),
    ],
)
def test_an_episode_that_could_not_be_trained_on_is_refused(
    tiny_model: Path, name: str, said: str, reason: str
) -> None:
    played = f"playing training task 3 with a model that says {said} failed: "
    with pytest.raises(UserError, match=rf"^env\.id = '\./played_of_a_test\.py:{name}': {played}{reason}"):
        rehearse(name, tiny_model)
