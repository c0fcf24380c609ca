"""What is said of classes that are no environments, before anything starts; what `setup` may do."""

import asyncio
import sys
from pathlib import Path

import pytest

from tandem.config.environment import EnvConfig
from tandem.envs.worker import make, prepare
from tandem.types.rollout import Task

OWN = """
from tandem.types.rollout import Task

TASKS = [Task(0, [{"role": "user", "content": "say b"}], "b")]

class Scores:
    train_tasks = eval_tasks = TASKS
    def score(self, task, completion): return 1.0

class Nothing: ...

def returns_nothing(): ...

class NoReward:
    train_tasks = eval_tasks = TASKS

class NothingHeldOut:
    train_tasks = TASKS
    def score(self, task, completion): return 1.0

class Rows(Scores):
    train_tasks = [{"prompt": "a", "answer": "b"}]

class Text(Scores):
    eval_tasks = [Task(0, "say b", "b")]

class OwnMistake(Scores):
    @property
    def train_tasks(self): return self.no_such_thing

class MadeBySetup:
    def setup(self): self.train_tasks = self.eval_tasks = TASKS
    def score(self, task, completion): return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_envs.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "half_envs", raising=False)


def answer_of(config: EnvConfig) -> dict:
    environment, answer = make(config)
    return asyncio.run(prepare(environment, config, with_tasks=True)) if environment is not None else answer


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Nothing", "has neither `score` nor `rollout`"),
        ("returns_nothing", "gave None, not an environment"),
        ("NoReward", "has neither `score` nor `rollout`"),
        ("NothingHeldOut", "has no `eval_tasks`"),
        ("Rows", "train_tasks[0] is no tandem.types.rollout.Task but {'prompt': 'a', 'answer': 'b'}"),
        ("Text", "the messages of eval_tasks[0] are no list of tables with role and content but 'say b'"),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(folder: None, name: str, reason: str) -> None:
    refused = answer_of(EnvConfig(id=f"./half_envs.py:{name}"))["refused"]
    assert refused.startswith(f"env.id = './half_envs.py:{name}'") and reason in refused and "\n" not in refused


def test_a_mistake_in_ones_own_code_is_shown_where_it_is(folder: None) -> None:
    refused = answer_of(EnvConfig(id="./half_envs.py:OwnMistake"))["refused"]
    assert "no_such_thing" in refused and "half_envs.py" in refused.partition("\n")[2]


def test_another_reward_makes_up_for_the_missing_one(folder: None) -> None:
    assert "ready" in answer_of(EnvConfig(id="./half_envs.py:NoReward", reward="exact_match"))


@pytest.mark.parametrize("options", [{}, {"system_prompt": "Be brief."}, {"reward": "exact_match"}])
def test_tasks_may_be_made_by_setup(folder: None, options: dict[str, str]) -> None:
    config = EnvConfig.model_validate({"id": "./half_envs.py:MadeBySetup"} | options)
    tasks = answer_of(config)["ready"]["tasks"]
    expected = Task(0, [{"role": "user", "content": "say b"}], "b")
    assert tasks["train"] == tasks["eval"]
    assert (tasks["train"][0]["messages"][-1:], tasks["train"][0]["answer"]) == (expected.messages, expected.answer)
