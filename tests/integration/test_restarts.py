"""Whoever is killed is started again, the run ends as if nothing had happened; and it is stopped from elsewhere."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.integration.processes import Starter, children_of, wait_until
from tests.patience import PATIENCE
from tests.ports import free_port

from tandem.trainer.checkpoints.history import newest_checkpoint
from tandem.utils.files import checksum, read_json_lines
from tandem.utils.metrics import read_metrics
from tandem.utils.run_dir import RunDir, step_name

MAX_STEPS = 20
SMALL = ["--orchestrator.prompts-per-step", "4", "--orchestrator.eval.num-prompts", "4"]


@pytest.fixture
def arguments(rl_arguments: list[str]) -> list[str]:
    return [*rl_arguments, *SMALL, "--restart-delay-s", "0.1"]


def wait_for_step(process: subprocess.Popen[str], run_dir: RunDir, step: int) -> None:
    def has_come() -> bool:
        return process.poll() is not None or trained(run_dir)[-1:] >= [step]

    wait_until(has_come, 240, f"step {step}")
    assert process.poll() is None, process.communicate()[0]


def trained(run_dir: RunDir) -> list[int]:
    return [line["step"] for line in read_metrics(run_dir) if line["process"] == "trainer"]


def restarts(run_dir: RunDir) -> list[dict[str, object]]:
    return [event for event in read_json_lines(run_dir.events) if event["event"] == "restarted"]


def test_whoever_is_killed_is_started_again_and_the_bits_are_the_same(
    starter: Starter, arguments: list[str], tmp_path: Path
) -> None:
    """As those of a run beside it, on another port, that is left alone."""
    arguments += ["--orchestrator.max-staleness", "0", "--deterministic", "--checkpoint.every", "2"]
    arguments += ["--max-steps", str(MAX_STEPS)]
    whole, cut = RunDir(tmp_path / "whole"), RunDir(tmp_path / "cut")
    port = ["--inference.server.port", str(free_port())]
    left_alone = starter.start("rl", *arguments, "--output-dir", str(whole.root), *port)
    process = starter.start("rl", *arguments, "--output-dir", str(cut.root))
    step = 0
    for count, name in enumerate(["inference", "orchestrator", "trainer"], start=1):
        wait_for_step(process, cut, step + 3)
        os.kill(children_of(process.pid)[name], signal.SIGKILL)
        has_restarted = lambda count=count: process.poll() is not None or len(restarts(cut)) == count  # noqa: E731
        wait_until(has_restarted, 120, f"the restart of the {name}")
        step = trained(cut)[-1]
    for run in (process, left_alone):
        output, _ = run.communicate(timeout=300 * PATIENCE)
        assert run.returncode == 0, output
    assert restarts(whole) == []
    events = restarts(cut)
    told = [(event["who"], str(event["why"]).split(",")[0], event["restart"]) for event in events]
    assert told == [(name, "signal SIGKILL", 1) for name in ("inference", "orchestrator", "trainer")]
    assert "step" not in events[0] and 0 < events[1]["step"] <= events[2]["step"]  # type: ignore[operator]
    assert trained(cut) == list(range(1, MAX_STEPS + 1))
    last = [checksum(run_dir.weights / step_name(MAX_STEPS) / "model.safetensors") for run_dir in (whole, cut)]
    assert last[0] == last[1]


def test_a_run_is_stopped_and_looked_at_from_another_terminal(
    starter: Starter, arguments: list[str], tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    process = starter.start("rl", *arguments, "--max-steps", "100000", "--checkpoint.every", "100000")
    wait_for_step(process, run_dir, 2)
    shown = starter.run("rl", "--status", str(run_dir.root))
    assert f"{run_dir.root}: running, `rl` (pid {process.pid} on " in shown.stdout and " of 100000" in shown.stdout
    stopped = starter.run("rl", "--stop", str(run_dir.root))
    assert stopped.returncode == 0, stopped.stdout
    output, _ = process.communicate(timeout=60 * PATIENCE)
    assert process.returncode == 143 and "rl: stopped by `rl --stop`; " in output, output
    saved = newest_checkpoint(run_dir)
    assert saved is not None and saved >= 2 and trained(run_dir)[-1] == saved
    assert f"stopped {run_dir.root}; the newest checkpoint is" in stopped.stdout
    shown = starter.run("rl", "--status", str(run_dir.root))
    assert "not running; the newest checkpoint is" in shown.stdout
    again = starter.run("rl", "--stop", str(run_dir.root))
    assert again.returncode == 0 and "nothing runs in" in again.stdout
