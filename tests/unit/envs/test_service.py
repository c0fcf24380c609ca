"""What is said of classes that are no environments, before anything starts; what `setup` may do."""

import asyncio
import sys
from pathlib import Path

import pytest

from tandem.envs.config import EnvConfig
from tandem.envs.service import make, prepare
from tandem.python.data_buffer import DataBuffer
from tandem.types.rollout import Task
from tandem.utils.errors import UserError

OWN = """
import functools
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

def scores(*tasks):
    # an environment with these training tasks
    made = Scores()
    made.train_tasks = list(tasks)
    return made

def said(index=0, messages=({"role": "user", "content": "say b"},), answer="b", info=None):
    return Task(index, list(messages), answer, {} if info is None else info)

def text_index(): return scores(said(), said("one"))
def true_index(): return scores(said(True))
def number_answer(): return scores(said(), said(1, answer=42))
def no_answer(): return scores(said(answer=None))
def list_info(): return scores(said(info=[1]))
def text_message(): return scores(said(messages=["say b"]))
def no_role(): return scores(said(messages=[{"content": "say b"}]))
def number_content(): return scores(said(messages=[{"role": "user", "content": 5}]))
def not_json(): return scores(said(), said(1, messages=[{"role": "user", "content": "b", "extra": {1, 2}}]))
def same_index(): return scores(said(), said(1), said(1, answer="c"))
def repeated(): return scores(said(), said(), said(1))

def numpy_index():
    import numpy as np
    return scores(said(np.int64(3)))

class Generated(Scores):
    @property
    def train_tasks(self): return (task for task in TASKS)

class ScoresText(Scores):
    def score(self, completion): return 1.0

class ScoreIsNumber(Scores):
    score = 1.0

class SetupTakesMore(Scores):
    def setup(self, config): ...

class CloseTakesMore(Scores):
    async def close(self, reason): ...

class Plays:
    train_tasks = eval_tasks = TASKS
    async def rollout(self, task, model): return 1.0

class PlaysAlone(Plays):
    async def rollout(self, task): return 1.0

class ScoresOnly(Scores):
    rollout = setup = close = tools = None

class PlaysOnly(Plays):
    score = setup = close = tools = None

class ScoreIsNone(Scores):
    score = None

class OneTool(Plays):
    def tools(self): ...

class NamedTool(Plays):
    tools = ["add"]

class AnyTool(Plays):
    tools = [{"type": "function", "function": {"name": "known"}}, lambda *numbers: sum(numbers)]

class StrangeTool(Plays):
    def odd(self, thing: "NoSuchType") -> int: return 1
    @property
    def tools(self): return [self.odd]

class WithoutEnd:
    # as torch's datasets are: it has a length, and any index will do
    def __len__(self): return 3
    def __getitem__(self, index): return Task(index, [{"role": "user", "content": "say b"}], "b")

class Lazy(Scores):
    train_tasks = WithoutEnd()

def with_judge(function):
    @functools.wraps(function)
    def call(self, task, completion): return function(self, task, completion, judge=1.0)
    return call

class Decorated(Scores):
    @with_judge
    def score(self, task, completion, judge): return judge

class Playing:
    async def __call__(self, task, model): return 1.0

class PlayedByObject(Plays):
    rollout = Playing()

def retried(function):
    @functools.wraps(function)
    def call(*args): return function(*args)
    return call

class PlaysDecorated(Plays):
    @retried
    async def rollout(self, task, model): return 1.0

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


def ready(config: EnvConfig) -> dict:
    return asyncio.run(prepare(make(config), config))


def refusal(config: EnvConfig) -> str:
    with pytest.raises(UserError) as refused:
        ready(config)
    return str(refused.value)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Nothing", "has neither `score` nor `rollout`"),
        ("returns_nothing", "gave None, not an environment"),
        ("NoReward", "has neither `score` nor `rollout`"),
        ("ScoreIsNone", "has neither `score` nor `rollout`"),
        ("NothingHeldOut", "has no `eval_tasks`"),
        ("Rows", "train_tasks[0] is no tandem.types.rollout.Task but {'prompt': 'a', 'answer': 'b'}"),
        (
            "ScoresText",
            "score(completion), half_envs.py:58 in score, is called with (task, completion), which it does not take: "
            "too many positional arguments; write `def score(self, task, completion)`",
        ),
        ("ScoreIsNumber", "score is 1.0, and has to be a method"),
        (
            "SetupTakesMore",
            "setup(config), half_envs.py:64 in setup, is called with (), which it does not take",
        ),
        ("CloseTakesMore", "close(reason), half_envs.py:67 in close, is called with ()"),
        ("PlaysAlone", "rollout(task), half_envs.py:74 in rollout, is called with (task, model)"),
        ("PlaysAlone", "write `async def rollout(self, task, model)`"),
        ("OneTool", "make it a tuple or a list of functions"),
        ("NamedTool", "tools[0] is 'add', neither a function nor a schema"),
        ("AnyTool", "a tool takes named arguments only; <lambda> has *numbers"),
        ("StrangeTool", "cannot be described to a model: NameError: name 'NoSuchType' is not defined"),
        (
            "Text",
            "eval_tasks[0] is a Task whose messages are 'say b' of type str; they must be a list of dicts with role "
            "and content",
        ),
        ("text_index", "train_tasks[1] is a Task whose index is 'one' of type str; it must be an int"),
        ("true_index", "train_tasks[0] is a Task whose index is True of type bool; it must be an int"),
        ("number_answer", "train_tasks[1] is a Task whose answer is 42 of type int; it must be a str: use str(…)"),
        ("no_answer", "train_tasks[0] is a Task whose answer is None of type NoneType; it must be a str"),
        ("list_info", "train_tasks[0] is a Task whose info is [1] of type list; it must be a dict"),
        ("text_message", "a Task whose messages[0] is 'say b' of type str; it must be a dict with role and content"),
        ("no_role", "a Task whose messages[0] has the role None of type NoneType; it must be a str such as 'user'"),
        ("number_content", "a Task whose messages[0] has the content 5 of type int; it must be a str"),
        ("not_json", "train_tasks[1] is a Task whose index, messages or answer cannot be written as JSON: Type is not"),
        ("Generated", "of type generator; make it a list of Tasks"),
        ("same_index", "train_tasks[1] and train_tasks[2] are different Tasks with index = 1; give each an index of"),
    ],
)
def test_what_is_no_environment_is_refused_in_one_line(folder: None, name: str, reason: str) -> None:
    refused = refusal(EnvConfig(id=f"./half_envs.py:{name}"))
    assert refused.startswith(f"env.id = './half_envs.py:{name}'") and reason in refused and "\n" not in refused


@pytest.mark.parametrize(("name", "indices"), [("repeated", [0, 0, 1]), ("numpy_index", [3])])
def test_a_task_may_be_there_twice_and_numbered_by_numpy(folder: None, name: str, indices: list[int]) -> None:
    tasks = ready(EnvConfig(id=f"./half_envs.py:{name}"))["tasks"]
    assert [task["index"] for task in tasks["train"]] == indices


@pytest.mark.parametrize("name", ["Rows", "number_answer", "text_message", "Generated"])
def test_tasks_are_checked_before_a_system_message_is_put_before_them(folder: None, name: str) -> None:
    config = EnvConfig(id=f"./half_envs.py:{name}")
    assert refusal(config.model_copy(update={"system_prompt": "Be brief."})) == refusal(config)


@pytest.mark.parametrize("system_prompt", [None, "Be brief."])
def test_tasks_may_be_a_lazy_sequence_that_raises_at_no_index(folder: None, system_prompt: str | None) -> None:
    tasks = ready(EnvConfig(id="./half_envs.py:Lazy", system_prompt=system_prompt))["tasks"]
    assert [task["index"] for task in tasks["train"]] == [0, 1, 2]


@pytest.mark.parametrize("name", ["Decorated", "PlayedByObject", "PlaysDecorated"])
def test_methods_may_be_objects_and_decorated(folder: None, name: str) -> None:
    assert ready(EnvConfig(id=f"./half_envs.py:{name}"))


@pytest.mark.parametrize(("name", "is_interactive"), [("ScoresOnly", False), ("PlaysOnly", True)])
@pytest.mark.parametrize("options", [{}, {"reward": "exact_match"}, {"system_prompt": "Be brief."}])
def test_a_method_that_is_none_is_not_there(folder: None, name: str, is_interactive: bool, options: dict) -> None:
    config = EnvConfig(id=f"./half_envs.py:{name}", **options)
    assert ready(config)["is_interactive"] == is_interactive
    assert DataBuffer.from_env(config.model_dump()).has_conversations == is_interactive


def test_a_mistake_in_ones_own_code_is_shown_where_it_is(folder: None) -> None:
    refused = refusal(EnvConfig(id="./half_envs.py:OwnMistake"))
    assert "no_such_thing" in refused and "half_envs.py" in refused.partition("\n")[2]


@pytest.mark.parametrize("name", ["NoReward", "ScoresText", "ScoreIsNumber"])
def test_another_reward_makes_up_for_the_missing_one(folder: None, name: str) -> None:
    assert ready(EnvConfig(id=f"./half_envs.py:{name}", reward="exact_match"))


@pytest.mark.parametrize("options", [{}, {"system_prompt": "Be brief."}, {"reward": "exact_match"}])
def test_tasks_may_be_made_by_setup(folder: None, options: dict[str, str]) -> None:
    config = EnvConfig.model_validate({"id": "./half_envs.py:MadeBySetup"} | options)
    tasks = ready(config)["tasks"]
    expected = Task(0, [{"role": "user", "content": "say b"}], "b")
    assert tasks["train"] == tasks["eval"]
    assert (tasks["train"][0]["messages"][-1:], tasks["train"][0]["answer"]) == (expected.messages, expected.answer)
