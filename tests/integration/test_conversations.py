"""Conversations and mixtures through real processes: what is sampled is what is trained on."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from tests.integration.processes import Starter

from tandem.data.batch_files import RolloutReader
from tandem.data.tokenizer import Tokenizer
from tandem.utils.files import read_json_lines
from tandem.utils.run_dir import RunDir

CONFIG = """\
max_steps = 2
seq_len = 256

[orchestrator]
prompts_per_step = 4
group_size = 3
max_staleness = 0

[orchestrator.sampling]
max_tokens = 8

[orchestrator.eval]
num_prompts = 2

[[orchestrator.envs]]
name = "game"
id = "guessing-game"
args = { num_train = 8, num_eval = 2, max_turns = 3 }

[[orchestrator.envs]]
name = "own"
id = "./my_env.py:polite"
group_size = 2

[inference]
"""
MINE = """\
from tandem.envs.decorator import environment

@environment(tasks=[{"prompt": f"say {n}", "answer": str(n)} for n in range(10)], held_out=2)
async def polite(task, model):
    first = await model.chat(task.messages)
    second = await model.chat([*task.messages, first.message, {"role": "user", "content": "thank you"}])
    return {"first": len(first.text) / 10, "second": len(second.text) / 10}
"""


@pytest.fixture
def model(tmp_path: Path, load_script: Callable[[str], ModuleType]) -> Path:
    load_script("calculator/make_model").main(tmp_path / "model")
    return tmp_path / "model"


def test_a_run_on_two_environments_with_conversations(
    starter: Starter, model: Path, tmp_path: Path, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "my_env.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    flags = ("--model.name", str(model), "--output-dir", "run", "--inference.server.port", str(free_port))
    done = starter.run("rl", "@", "run.toml", *flags)
    assert done.returncode == 0, done.stdout
    run_dir = RunDir(tmp_path / "run")

    lines = [line for step in (1, 2) for line in read_json_lines(run_dir.samples(step))]
    assert len(lines) == 2 * (2 * 3 + 2 * 2)
    own = [line for line in lines if "rewards" in line]
    assert len(own) == 8 and all(
        len(line["turns"]) == 3 and set(line["rewards"]) == {"first", "second"} for line in own
    )
    games = [line for line in lines if "rewards" not in line]
    assert {line["ended"] for line in games} <= {"found", "max_turns", "length"}
    assert all(line["reward"] == pytest.approx(sum(line["rewards"].values())) for line in own)

    step = next(line for line in read_json_lines(run_dir.metrics) if line["step"] == 1 and "reward/mean" in line)
    assert (step["game/groups"], step["own/groups"], step["sequences/mean"]) == (2, 2, 1.0)
    assert step["own/turns/mean"] == 2.0 and "own/reward/first" in step and "env/guesses" in step
    evaluated = {key for line in read_json_lines(run_dir.metrics) for key in line if key.startswith("eval/")}
    assert {"eval/reward", "eval/game/reward", "eval/own/reward"} <= evaluated

    tokenizer = Tokenizer(model)
    packed = RolloutReader(run_dir.rollouts, timeout_s=1).read(1).packed
    first_step = read_json_lines(run_dir.samples(1))
    assert packed.num_sequences == len(first_step)
    assert packed.num_loss_tokens == sum(line["num_tokens"] for line in first_step)
    said = tokenizer.decode(packed.token_ids.tolist(), skip_special_tokens=False)
    assert "user\nthank you<|im_end|>\n<|im_start|>assistant\n" in said
