"""`rl` as it is typed, up to where processes would be started."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.ports import free_port

from tandem.entrypoints import rl
from tandem.launch.local import gpus
from tandem.utils.files import read_json

Type = Callable[..., int]


@pytest.fixture
def type_rl(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Type:
    """Types `rl` with a model, a run directory and what a test adds; returns the exit code."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr(gpus, "gpu_memory_bytes", tuple)
    tasks = ["--orchestrator.env.args", '{"num_train": 4, "num_eval": 2}']
    given = ["--model.name", str(tiny_model), "--output-dir", str(tmp_path / "run"), "--seq-len", "256", *tasks]

    def type_it(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["rl", *given, *arguments])
        try:
            rl.main()
        except SystemExit as end:
            return int(end.code or 0)
        return 0

    return type_it


def test_a_dry_run_prints_the_gpus_and_writes_the_plan(type_rl: Type, tmp_path: Path, capsys) -> None:
    port = str(free_port())
    assert type_rl("--inference.server.port", port, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert f"http://127.0.0.1:{port}" in printed and "CUDA_VISIBLE_DEVICES=2\n" in printed
    assert "CUDA_VISIBLE_DEVICES=3\n" in printed and "memory of each GPU" in printed
    plan = read_json(tmp_path / "run" / "dry_run" / "plan.json")
    assert plan["trainer"]["environment"] == ["CUDA_VISIBLE_DEVICES", "OMP_WAIT_POLICY", "PYTHONUNBUFFERED"]


def test_more_than_there_is_gives_one_error(type_rl: Type, tmp_path: Path, capsys) -> None:
    assert type_rl("--inference.max-sequences", "8", "--gpus.trainer", "2", "--dry-run") == 2
    assert capsys.readouterr().err == (
        "rl: gpus: 3 are asked for; 2 visible (CUDA_VISIBLE_DEVICES = '2,3'), 0 to 1. The plan: inference 0; "
        "trainer 1 and 1 more\n"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words", [["--stop"], ["--stop", "a", "--clean"], ["@", "a.toml", "--status", "a"], ["--stop="]]
)
def test_a_run_is_controlled_by_its_directory_alone(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["rl", *words])
    with pytest.raises(SystemExit) as end:
        rl.main()
    problem = capsys.readouterr().err
    assert end.value.code == 2 and problem.count("\n") == 1 and "one run directory" in problem


def test_a_dry_run_tries_a_loss_of_ones_own(type_rl: Type, tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "loss_of_a_dry_run.py").write_text(
        "from tandem.trainer.losses import Losses\n"
        "def right(streams): return Losses(-streams.logprobs * streams.advantages)\n"
        "def wrong(streams): return Losses(-streams.logprobs.mean())\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [*sys.path])
    given = ["--inference.server.port", str(free_port()), "--dry-run", "--trainer.loss.type"]
    assert type_rl(*given, "./loss_of_a_dry_run.py:right") == 0
    capsys.readouterr()
    assert type_rl(*given, "./loss_of_a_dry_run.py:wrong") == 2
    assert capsys.readouterr().err == (
        "rl: trainer.loss.type = './loss_of_a_dry_run.py:wrong' returned losses of shape (); return one per token: "
        "(9,)\n"
    )
    del sys.modules["loss_of_a_dry_run"]
