"""Environments by name or import path; mistakes are told with what would be right."""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.envs.config import EnvConfig
from tandem.envs.process import open_environment
from tandem.envs.protocol import Score
from tandem.envs.registry import check_names, make_environment
from tandem.envs.reverse_text import ReverseText
from tandem.envs.system_prompt import SystemPrompted
from tandem.envs.trial import try_environment
from tandem.rewards import registry as rewards
from tandem.types.rollout import Task
from tandem.utils.errors import UserError


def test_by_name_with_arguments() -> None:
    environment = make_environment(EnvConfig(id="reverse-text", args={"num_train": 5, "num_eval": "2"}))
    assert isinstance(environment, ReverseText)
    assert (len(environment.train_tasks), len(environment.eval_tasks)) == (5, 2)


def test_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_envs_of_a_test.py").write_text(
        "class Mine:\n    def __init__(self, size):\n        self.train_tasks = self.eval_tasks = [0] * size\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert len(make_environment(EnvConfig(id="my_envs_of_a_test:Mine", args={"size": 3})).train_tasks) == 3
    with pytest.raises(UserError, match=r"env\.args = \{'sise': 3\} does not fit env\.id = 'my_envs_of_a_test:Mine'"):
        make_environment(EnvConfig(id="my_envs_of_a_test:Mine", args={"sise": 3}))
    with pytest.raises(UserError, match=r"env\.id = 'my_envs_of_a_test:Other' cannot be imported: .*Other"):
        make_environment(EnvConfig(id="my_envs_of_a_test:Other"))
    sys.modules.pop("my_envs_of_a_test")


MINE = """\
import beside_the_env_of_a_test
from dataclasses import dataclass

@dataclass
class Mine:
    size: int = beside_the_env_of_a_test.SIZE

    def __post_init__(self):
        self.train_tasks = self.eval_tasks = [0] * self.size
"""


@pytest.fixture
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that imports another beside it, in a directory that Python does not look into."""
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "beside_the_env_of_a_test.py").write_text("SIZE = 4\n")
    (folder / "env_of_a_test.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    yield folder / "env_of_a_test.py"
    for name in ("beside_the_env_of_a_test", "env_of_a_test", "broken"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("path", ["./folder/env_of_a_test.py", "folder/env_of_a_test.py", "{tmp_path}/{path}"])
def test_by_file(own_file: Path, tmp_path: Path, path: str) -> None:
    path = str(own_file) if "{" in path else path
    environment = make_environment(EnvConfig(id=f"{path}:Mine"))
    assert len(environment.train_tasks) == 4
    again = make_environment(EnvConfig(id=f"{path}:Mine", args={"size": 2}))
    assert type(again) is type(environment) and len(again.train_tasks) == 2


def test_a_module_in_the_current_directory(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_file.parent)
    assert len(make_environment(EnvConfig(id="env_of_a_test:Mine")).train_tasks) == 4


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("./folder/env_of_a_test.py", r"names a file; name the object in it too, as in '\./.*\.py:name'"),
        ("./folder/none.py:Mine", r"cannot be imported: there is no file '.*/folder/none\.py'"),
        ("./folder/env_of_a_test.py:Mien", r"has no 'Mien'; did you mean 'Mine'\?"),
        ("./broken.py:Mine", r"cannot be imported: ZeroDivisionError: division by zero"),
        ("./json.py:Mine", r"there is another module called 'json'; give the file another name"),
    ],
)
def test_files_that_cannot_be_used(own_file: Path, tmp_path: Path, env_id: str, message: str) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "json.py").write_text(MINE)
    with pytest.raises(UserError, match=message):
        make_environment(EnvConfig(id=env_id))
    assert "broken" not in sys.modules


def test_a_system_prompt_comes_before_every_task() -> None:
    args = {"num_train": 5, "num_eval": 2}
    plain = make_environment(EnvConfig(args=args))
    environment = make_environment(EnvConfig(args=args, system_prompt="Be brief."))
    for before, after in ((plain.train_tasks, environment.train_tasks), (plain.eval_tasks, environment.eval_tasks)):
        assert [task.messages[0] for task in after] == [{"role": "system", "content": "Be brief."}] * len(before)
        assert [task.messages[1:] for task in after] == [task.messages for task in before]
        assert [task.answer for task in after] == [task.answer for task in before]
    (task, *_) = environment.train_tasks
    score: Any = environment.score(task, task.answer)
    assert asyncio.run(score) == 1.0


def test_a_second_system_message_is_refused() -> None:
    class Own:
        eval_tasks = ()
        train_tasks = (Task(7, [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "z"),)

        async def score(self, task: Task, completion: str) -> float:
            return 0.0

    with pytest.raises(UserError, match=r"env\.system_prompt = 'Be brief\.', but task 7 has a system message"):
        list(SystemPrompted(Own(), "Be brief.").train_tasks)


def test_an_unknown_name() -> None:
    with pytest.raises(UserError, match=r"env\.id = 'revers-text' is not known; did you mean 'reverse-text'\?"):
        make_environment(EnvConfig(id="revers-text"))


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(UserError, match=r"env\.id = 'no\.such:Env' cannot be imported: No module named 'no'"):
        make_environment(EnvConfig(id="no.such:Env"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"min_lenght": 3}, r"unknown key 'env\.args\.min_lenght' \(value 3\); did you mean 'min_length'\?"),
        ({"num_train": "many"}, r"env\.args\.num_train = 'many' is not valid: input should be a valid integer"),
        ({"min_length": 9}, r"env\.args = .* does not fit env\.id = 'reverse-text': min_length = 9 is above"),
    ],
)
def test_arguments_that_do_not_suit(args: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_environment(EnvConfig(args=args))


def test_options_of_an_environment_are_named_as_they_are_given() -> None:
    with pytest.raises(UserError, match=r"env\.args\.id is required .* \(of `rl`: --orchestrator\.env\.args\.id\)"):
        make_environment(EnvConfig(id="verifiers"))
    with pytest.raises(UserError, match=r"^env\.args: give either dataset or datasets$"):
        make_environment(EnvConfig(id="reasoning-gym"))


def test_a_function_without_the_decorator(tmp_path: Path) -> None:
    path = tmp_path / "undecorated_of_a_test.py"
    path.write_text("def plain(task, completion): return 1\ndef makes(size): raise ValueError('too small')\n")
    with pytest.raises(UserError, match=r"is a function of \(task, completion\), .* decorate it with @environment"):
        make_environment(EnvConfig(id=f"{path}:plain"))
    with pytest.raises(
        UserError, match=r"does not fit env\.id = .*: too small \(undecorated_of_a_test\.py:2 in makes\)$"
    ):
        make_environment(EnvConfig(id=f"{path}:makes", args={"size": 1}))
    sys.modules.pop("undecorated_of_a_test", None)


REWARDS = """\
def length(completion, answer):
    return len(completion) / len(answer)

async def waits(completion, answer):
    return length(completion, answer) / 2

def nothing(completion, answer):
    return None

def alone(completion):
    return 1.0

def of_task(task, completion, answer):
    return 1.0
"""


@pytest.fixture
def own_rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "rewards_of_a_test.py").write_text(REWARDS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("rewards_of_a_test", None)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [("exact_match", 0.0), ("rewards_of_a_test:length", 0.5), ("./rewards_of_a_test.py:waits", 0.25)],
)
def test_another_reward_function(own_rewards: None, reward: str, expected: float) -> None:
    """In the environment's own process, as in a run; its own gives 0 for text without a letter."""

    async def score() -> list[Score]:
        config = EnvConfig(args={"num_train": 4, "num_eval": 2}, reward=reward, system_prompt="Be brief.")
        async with open_environment(config) as environment:
            await try_environment(environment, config)
            task = environment.train_tasks[0]
            return [await environment.score(task, text) for text in ("#" * 4, task.answer)]

    half, full = asyncio.run(score())
    assert (half, full) == (expected, 2 * expected or 1.0)


def test_a_score_that_is_no_reward_names_the_function(own_rewards: None) -> None:
    async def score() -> None:
        config = EnvConfig(args={"num_train": 4, "num_eval": 2}, reward="./rewards_of_a_test.py:nothing")
        async with open_environment(config) as environment:
            await try_environment(environment, config)

    with pytest.raises(UserError, match=r"the reward is None, not a number \(rewards_of_a_test\.py:7 in nothing\)"):
        asyncio.run(score())


def test_a_reward_whose_package_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.rewards.registry.find_spec", lambda name: None)
    named = set(rewards.NEEDS) & set(rewards.REWARDS)
    assert named == {"math"}
    for name in named:
        told = rf"env\.reward = '{name}' needs {rewards.NEEDS[name]}; pip install 'tandem-rl\[rewards\]'"
        for find in (make_environment, check_names):
            with pytest.raises(UserError, match=told):
                find(EnvConfig(id="arithmetic", reward=name))


def test_a_reward_function_that_is_not_known(own_rewards: None) -> None:
    with pytest.raises(UserError, match=r"env\.reward = 'exact' is not known; did you mean 'exact_match'\?"):
        make_environment(EnvConfig(reward="exact"))
    with pytest.raises(UserError, match=r"env\.reward = 'rewards_of_a_test:lenght' cannot be imported: .*'length'"):
        make_environment(EnvConfig(reward="rewards_of_a_test:lenght"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("alone", r"alone\(completion\), rewards_of_a_test\.py:10 in alone, .*: too many positional arguments"),
        ("of_task", r"of_task\(task, completion, answer\), rewards_of_a_test\.py:13 in of_task, .* 'answer'"),
    ],
)
def test_a_reward_function_of_other_arguments(own_rewards: None, name: str, message: str) -> None:
    config = EnvConfig(reward=f"./rewards_of_a_test.py:{name}")
    with pytest.raises(UserError, match=rf"^env\.reward = '\./rewards_of_a_test\.py:{name}': {message}") as caught:
        make_environment(config)
    assert "is called with (completion, answer)" in str(caught.value)
    assert str(caught.value).endswith(f"write `def {name}(completion, answer)`")
    with pytest.raises(UserError, match=message):
        check_names(config)


def test_several_rewards_come_back_by_name(own_rewards: None) -> None:
    """In the environment's own process, as in a run."""

    async def score() -> list[Any]:
        tables = [
            {"type": "exact_match", "weight": 0.5},
            {"type": "./rewards_of_a_test.py:length", "weight": 2.0, "name": "size"},
            {"type": "./rewards_of_a_test.py:waits"},
        ]
        config = EnvConfig.model_validate({"args": {"num_train": 4, "num_eval": 2}, "rewards": tables})
        async with open_environment(config) as environment:
            await try_environment(environment, config)
            task = environment.train_tasks[0]
            return [await environment.score(task, text) for text in ("#" * 4, task.answer)]

    assert asyncio.run(score()) == [
        {"exact_match": 0.0, "size": 1.0, "waits": 0.25},
        {"exact_match": 0.5, "size": 2.0, "waits": 0.5},
    ]


def test_one_of_several_that_is_no_reward_is_named(own_rewards: None) -> None:
    async def score() -> None:
        tables = [{"type": "exact_match"}, {"type": "./rewards_of_a_test.py:nothing"}]
        config = EnvConfig.model_validate({"args": {"num_train": 4, "num_eval": 2}, "rewards": tables})
        async with open_environment(config) as environment:
            await try_environment(environment, config)

    with pytest.raises(UserError, match="nothing: BadReward: the reward is None, not a number"):
        asyncio.run(score())
