"""Environments by name or import path; mistakes are told with what would be right."""

import sys
from pathlib import Path

import pytest

from tandem.config.orchestrator import EnvConfig
from tandem.envs.registry import make_environment
from tandem.envs.reverse_text import ReverseText
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
    with pytest.raises(UserError, match=r"env\.args = \{'sise': 3\} does not suit env\.id = 'my_envs_of_a_test:Mine'"):
        make_environment(EnvConfig(id="my_envs_of_a_test:Mine", args={"sise": 3}))
    with pytest.raises(UserError, match=r"env\.id = 'my_envs_of_a_test:Other' cannot be imported: .*Other"):
        make_environment(EnvConfig(id="my_envs_of_a_test:Other"))
    sys.modules.pop("my_envs_of_a_test")


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
        ({"min_length": 9}, r"env\.args = .* does not suit env\.id = 'reverse-text': min_length = 9 is above"),
    ],
)
def test_arguments_that_do_not_suit(args: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_environment(EnvConfig(args=args))
