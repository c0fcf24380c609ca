"""Parts that users bring by import path: one file with an environment, a reward function, advantages and an engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.processes import Starter

from tandem.utils.files import read_json_lines
from tandem.utils.run_dir import RunDir

# Everything is told apart from ours by its numbers: rewards of 10 or 20, advantages of 5 or -5.
MINE = """\
from tandem.envs.reverse_text import ReverseText
from tandem.serving.builders import build_native

class Short(ReverseText):
    def __init__(self):
        super().__init__(num_train=8, num_eval=2, min_length=3, max_length=3)

def reward(completion, answer):
    return 20.0 if completion[:1] == answer[:1] else 10.0

def advantages(groups):
    return [[5.0 if reward == 20 else -5.0 for reward in group] for group in groups]

def build(config, tokenizer, on_failure):
    print("building my engine for", config.model.name.name)
    return build_native(config, tokenizer, on_failure)
"""
Arguments = Callable[..., list[str]]


@pytest.fixture
def arguments(tmp_path: Path, tiny_model: Path, free_port: int) -> Arguments:
    mine = tmp_path / "my_parts.py"
    mine.write_text(MINE)

    def make(**names: str) -> list[str]:
        parts = {"env": "Short", "reward": "reward", "advantages": "advantages", "engine": "build"} | names
        return [
            *("@", "examples/reverse_text/rl.toml", "--model.name", str(tiny_model)),
            *("--output-dir", str(tmp_path / "run"), "--inference.server.port", str(free_port)),
            *("--orchestrator.env.id", f"{mine}:{parts['env']}", "--orchestrator.env.args", "{}"),
            *("--orchestrator.env.reward", f"{mine}:{parts['reward']}"),
            *("--orchestrator.advantage.type", f"{mine}:{parts['advantages']}"),
            *("--inference.engine", f"{mine}:{parts['engine']}"),
            *("--orchestrator.prompts-per-step", "2", "--orchestrator.group-size", "4", "--max-steps", "1"),
        ]

    return make


def test_a_run_on_parts_of_the_users_own(starter: Starter, arguments: Arguments, tmp_path: Path) -> None:
    done = starter.run("rl", *arguments())
    assert done.returncode == 0, done.stdout
    run_dir = RunDir(tmp_path / "run")
    samples = read_json_lines(run_dir.samples(1))
    assert len(samples) == 8
    assert all(line["advantage"] == (5.0 if line["reward"] == 20.0 else -5.0) for line in samples)
    assert {line["reward"] for line in samples} <= {10.0, 20.0}
    assert "building my engine for" in run_dir.log("inference").read_text()


@pytest.mark.parametrize(
    ("part", "key", "nearest"),
    [
        ("env", "env.id", "Short"),
        ("reward", "env.reward", "reward"),
        ("advantages", "advantage.type", "advantages"),
        ("engine", "inference.engine", "build"),
    ],
)
def test_a_wrong_path_is_refused_before_anything_starts(
    starter: Starter, arguments: Arguments, tmp_path: Path, part: str, key: str, nearest: str
) -> None:
    done = starter.run("rl", *arguments(**{part: f"{nearest}x"}), timeout_s=60)
    assert done.returncode == 2, done.stdout
    assert f"{key} = '{tmp_path}/my_parts.py:{nearest}x' cannot be imported: " in done.stdout
    assert f"has no '{nearest}x'; did you mean {nearest!r}?" in done.stdout
    assert not (tmp_path / "run" / "logs").exists(), "something was started"


def test_the_server_alone_refuses_a_wrong_engine(starter: Starter, tiny_model: Path, free_port: int) -> None:
    flags = ("--model.name", str(tiny_model), "--server.port", str(free_port))
    done = starter.run("inference", *flags, "--engine", "./nowhere.py:build", timeout_s=60)
    assert done.returncode == 2, done.stdout
    assert "inference: engine = './nowhere.py:build' cannot be imported: there is no file" in done.stdout
