"""Rewards as a run has them: several by name, a goal-space server, steering on it."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tests import ports
from tests.integration.processes import Starter
from tests.integration.servers import wait_until_healthy

from tandem.utils.files import read_json_lines
from tandem.utils.metrics import read_metrics
from tandem.utils.run_dir import RunDir

REWARDS = """\
[[orchestrator.env.rewards]]
type = "positional_match"
weight = 0.75

[[orchestrator.env.rewards]]
type = "regex"
pattern = "[aeiou]"
weight = 0.25
name = "has_a_vowel"
"""


def test_each_of_several_rewards_is_logged_and_their_sum_is_learned_from(
    starter: Starter, rl_arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "rewards.toml").write_text(REWARDS)
    short = ["--max-steps", "2", "--orchestrator.prompts-per-step", "4"]
    done = starter.run("rl", *rl_arguments, "@", str(tmp_path / "rewards.toml"), *short)
    assert done.returncode == 0, done.stdout
    run_dir = RunDir(tmp_path / "run")
    samples = read_json_lines(run_dir.samples(1))
    for line in samples:
        assert line["reward"] == sum(line["rewards"].values())
        assert line["rewards"]["has_a_vowel"] == 0.25 * bool(set(line["completion"]) & set("aeiou"))
    (step,) = [line for line in read_metrics(run_dir) if line["step"] == 1 and "reward/mean" in line]
    for name in ("positional_match", "has_a_vowel"):
        assert step[f"reward/{name}"] == pytest.approx(sum(line["rewards"][name] for line in samples) / len(samples))


def test_steering_on_two_goals_learns(
    starter: Starter, rl_arguments: list[str], tmp_path: Path, load_script: Callable[[str], ModuleType]
) -> None:
    port = ports.free_port()
    url = f"http://127.0.0.1:{port}"
    server = starter.start("reward_server", "@", "examples/steering/reward_server_letters.toml", "--port", str(port))
    wait_until_healthy(server, url)
    toml = tmp_path / "steering.toml"
    text = Path("examples/steering/rl_letters.toml").read_text().replace("http://127.0.0.1:8100", url)
    toml.write_text("\n".join(line for line in text.splitlines() if not line.startswith("output_dir")))
    run = tmp_path / "run"
    own = ["--model.name", rl_arguments[3], "--output-dir", str(run), *rl_arguments[6:8]]
    done = starter.run("rl", "@", str(toml), *own)
    assert done.returncode == 0, done.stdout
    rewards = [line["eval/reward"] for line in read_metrics(RunDir(run)) if "eval/reward" in line]
    assert rewards[-1] > rewards[0] + 0.1, rewards
    svg = load_script("steering/plot").main(run, ["num_letters", "vowel_share"], url).read_text()
    assert svg.count("<circle") == 2 * 64
