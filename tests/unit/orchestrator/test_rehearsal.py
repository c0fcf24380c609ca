"""Episodes are played before anything starts, through the conversation that a run would have with the model."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem.config.orchestrator import OrchestratorConfig
from tandem.data.tokenizer import Tokenizer
from tandem.envs.mixture import open_environments
from tandem.orchestrator.rehearsal import try_environments
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
        async with open_environments(config) as environment:
            await try_environments(environment, config, Tokenizer(tiny_model))

    asyncio.run(run())


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
