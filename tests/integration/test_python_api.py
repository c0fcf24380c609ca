"""The Python API with real processes: what the documentation shows, one node with deaths on the way, GRPO in a file."""

import argparse
import ast
import asyncio
import doctest
import os
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tests.documentation import FENCE, ROOT

import tandem
from tandem.api import training
from tandem.types.rollout import Group, TrainBatch
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
    make_batch = training._make_batch
    victims = {2: "engine_1/inference.json", 3: "config/trainer.json"}

    def make_batch_and_kill(groups: Sequence[Group], step: int, *others: Any) -> TrainBatch:
        if step in victims:
            kill(victims.pop(step))
        return make_batch(groups, step, *others)

    monkeypatch.setattr(training, "_make_batch", make_batch_and_kill)
    example, run_dir = load_script("python/one_node"), RunDir(tmp_path / "run")
    args = example.parse_arguments(
        ["--model", str(tiny_model), "--output-dir", str(run_dir.root), "--steps", "5", "--ranks", "1"]
    )
    metrics = asyncio.run(example.main(args))
    assert [line["step"] for line in metrics] == [1, 2, 3, 4, 5] and victims == {}
    restarts = [line for line in read_json_lines(run_dir.events) if line["event"] == "trainer_restarted"]
    assert len(restarts) == 1 and "the trainer ended with signal SIGKILL" in restarts[0]["reason"]
    starts = [line for line in read_json_lines(run_dir.events) if line["event"] == "started"]
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
