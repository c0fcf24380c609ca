"""The Python API with real processes: what the documentation shows, one node with deaths on the way, GRPO in a file."""

import argparse
import ast
import asyncio
import doctest
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from tests.documentation import FENCE, ROOT
from tests.ports import free_port

import tandem
from tandem.orchestrator.loop import Orchestrator
from tandem.orchestrator.state import OrchestratorState
from tandem.types.rollout import Group
from tandem.utils.files import read_json_lines
from tandem.utils.processes import descendants
from tandem.utils.run_dir import RunDir

PAGE = ROOT / "docs" / "python.md"
BLOCKS = [code for language, code in FENCE.findall(PAGE.read_text()) if language == "python"]


def test_the_documentation_says_what_happens(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(tiny_model, tmp_path / "models" / "reverse_text")
    monkeypatch.chdir(tmp_path)
    code = "\n".join(block for block in BLOCKS if ">>>" in block)
    test = doctest.DocTestParser().get_doctest(code, {}, "docs/python.md", str(PAGE), 0)
    said: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=said.append)
    assert results.attempted > 10 and results.failed == 0, "".join(said)


def test_other_code_of_the_documentation_uses_names_that_exist() -> None:
    shown = [block for block in BLOCKS if ">>>" not in block]
    assert shown
    for block in shown:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module == "tandem":
                assert {alias.name for alias in node.names} <= set(tandem.__all__)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tandem":
                assert node.attr in tandem.__all__
    listed = {
        name for line in PAGE.read_text().splitlines() if line.startswith("| `") for name in line.split("`")[1::2]
    }
    assert {name for name in tandem.__all__ if name[0].isupper()} <= listed


def test_the_plot_of_the_documentation_draws_evaluations_between_which_there_are_steps() -> None:
    [code] = [block for block in BLOCKS if ".plot(" in block]
    rows = [{"step": step, "reward/mean": step / 10, "lr": 1e-4, "process": "trainer"} for step in range(1, 7)]
    rows = [{"step": 0}, *rows]
    for step, reward in ((0, 0.1), (3, 0.4), (6, 0.2)):
        rows[step]["eval/reward"] = reward
    matplotlib.use("agg")
    exec(code, {"rows": rows})
    lines = {line.get_label(): np.asarray(line.get_xydata()) for line in pyplot.gcf().axes[0].get_lines()}
    pyplot.close()
    assert set(lines) == {"reward/mean", "eval/reward"}
    assert lines["eval/reward"] == pytest.approx(
        np.array([(0, 0.1), (1, 0.2), (2, 0.3), (3, 0.4), (4, 1 / 3), (5, 0.8 / 3), (6, 0.2)])
    )
    assert lines["reward/mean"][1:] == pytest.approx(np.array([(step, step / 10) for step in range(1, 7)]))


# As a notebook is: nothing in it can be imported, and no part of it is below `if __name__ == "__main__":`.
PROGRAM = """\
import json, sys
import tandem
from tandem.types.rollout import Task

SCALE, model, rows = 0.5, sys.argv[1], sys.argv[2]

def length(text):
    return SCALE * len(text)

def reward(completion, answer):
    return 7 + length(completion)

def advantages_above(bar):
    def advantages(groups):
        return [[reward - bar for reward in group] for group in groups]
    return advantages

class Letters:
    def __init__(self, letters="abcdef"):
        asked = [[{"role": "user", "content": letter}] for letter in letters]
        self.train_tasks = [Task(i, messages, letters[i]) for i, messages in enumerate(asked)]
        self.eval_tasks = self.train_tasks[:2]

    def score(self, task, completion):
        return float(completion == task.answer)

short = {"seq_len": 64, "threads": 1}
trained = tandem.sft(
    model=model, chat_template="own.jinja", data={"path": rows}, max_steps=2, batch_size=4, lr=1e-3, output_dir="sft",
    **short,
)
folder = tandem.export("sft", output_dir="exported")
scores = tandem.evaluate(model=folder, env=Letters, num_prompts=2, max_tokens=4, **short)
metrics = tandem.rl(
    model=folder, seq_len=64, max_steps=1, prompts_per_step=2, group_size=2, sampling={"max_tokens": 4}, inference={},
    env=Letters, reward=reward, advantage=advantages_above(1.0), eval={"num_prompts": 2}, output_dir="rl", show="lines",
    port=int(sys.argv[3]),
)
print(json.dumps([trained, scores, metrics]))
"""


def test_the_commands_with_what_a_notebook_defines(tiny_model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"prompt": "{letter}", "completion": "{letter}"}}\n' for letter in "abcdefgh"))
    template = (tiny_model / "chat_template.jinja").read_text() + "{# of one's own #}"
    (tmp_path / "own.jinja").write_text(template)
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    command = [sys.executable, str(script), str(tiny_model), str(rows), str(free_port())]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    trained, (scores,), metrics = json.loads(done.stdout.splitlines()[-1])
    assert [row["step"] for row in trained] == [1, 2] and all(row["loss"] > 0 for row in trained)
    assert scores["num_prompts"] == 2 and 0 <= scores["reward"] <= 1
    # Each step is one row of all processes, evaluations included.
    assert [row["step"] for row in metrics] == [0, 1] and all("eval/reward" in row for row in metrics)
    assert metrics[1]["reward/min"] >= 7.0 and "loss" in metrics[1] and "trainer/tokens_per_s" in metrics[1]
    written = {path.name.rpartition("_")[0] for path in (tmp_path / "rl" / "functions").glob("*.py")}
    assert written == {"Letters", "reward", "advantages"}
    # A chat template that was given stays with the model.
    for folder in ("sft/weights/latest", "exported", "rl/weights/latest"):
        assert (tmp_path / folder / "chat_template.jinja").read_text() == template


def kill(pattern: str) -> None:
    """What this process has started with such a command line."""
    pids = [pid for pid in descendants(os.getpid()) if pattern in command_of(pid)]
    assert pids, pattern
    for pid in pids:
        with suppress(ProcessLookupError):  # it has ended with another one
            os.kill(pid, signal.SIGKILL)


def test_one_node_trains_on_when_an_engine_and_the_trainer_are_killed(
    tiny_model: Path, tmp_path: Path, load_script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Orchestrator._stage_batch
    victims = {2: "engine_1/inference.json", 3: "config/trainer.json"}

    def kill_and_stage(loop: Orchestrator, groups: list[Group], step: int, state: OrchestratorState) -> None:
        if step in victims:
            kill(victims.pop(step))
        stage(loop, groups, step, state)

    monkeypatch.setattr(Orchestrator, "_stage_batch", kill_and_stage)
    example, run_dir = load_script("python/one_node"), RunDir(tmp_path / "run")
    args = example.parse_arguments(
        ["--model", str(tiny_model), "--output-dir", str(run_dir.root), "--steps", "5", "--ranks", "1"]
    )
    metrics = asyncio.run(example.main(args))
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5] and victims == {}
    restarts = [line for line in read_json_lines(run_dir.events) if line["event"] == "trainer_restarted"]
    assert len(restarts) == 1 and "the trainer ended with signal SIGKILL" in restarts[0]["reason"]
    events = [line for line in read_json_lines(run_dir.events) if line["process"] == "trainer"]
    starts = [line for line in events if line["event"] == "started"]
    assert [line["ranks"] for line in starts] == [1, 1]
    assert not any("tandem.entrypoints" in command_of(pid) for pid in descendants(os.getpid()))


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_grpo_in_one_file_learns(load_script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    example = load_script("python/grpo_in_one_file")
    defaults = {"model": None, "steps": 6, "prompts": 16, "group_size": 8, "max_tokens": 16, "updates": 2, "seed": 0}
    args = argparse.Namespace(**defaults, lr=1e-3, clip=0.2, kl=0.01)
    means = example.train(args, tmp_path)
    assert len(means) == 6 and means[-1] > 1.5 * means[0]
