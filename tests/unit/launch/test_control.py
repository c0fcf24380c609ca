"""A run seen from another terminal."""

import io
import json
import os
from pathlib import Path

import pytest

from tandem.config.shared import CheckpointConfig
from tandem.launch import control
from tandem.launch.control import StopRequest, print_status, status_lines, stop_run
from tandem.utils.console import Console
from tandem.utils.errors import UserError
from tandem.utils.manifest import write_manifest
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir, step_name
from tandem.utils.run_lock import hold_run


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    run_dir.create()
    (run_dir.config / "rl.json").write_text(json.dumps({"max_steps": 9, "checkpoint": {"on_signal_timeout_s": 1}}))
    return run_dir


def test_a_request_is_seen_and_that_of_an_earlier_start_is_not(run_dir: RunDir) -> None:
    now = [0.0]
    run_dir.stop_request.touch()
    request = StopRequest(run_dir, clock=lambda: now[0])
    assert not request.is_there()
    run_dir.stop_request.touch()
    assert not request.is_there()  # looked for twice a second only
    now[0] = 1.0
    assert request.is_there()


def test_the_state_of_a_run(run_dir: RunDir) -> None:
    assert "not running; there is no checkpoint yet" in status_lines(run_dir.root)[0]
    RunLog(run_dir, "trainer").metrics(4, {"loss": 1.0})
    RunLog(run_dir, "orchestrator").metrics(4, {"reward/mean": 0.25})
    RunLog(run_dir, "orchestrator").metrics(5, {"reward/mean": 0.5})
    RunLog(run_dir, "rl").event("restarted", who="trainer", why="signal SIGKILL", restart=1, step=3)
    (run_dir.checkpoints / step_name(3)).mkdir(parents=True)
    write_manifest(run_dir.checkpoints / step_name(3), 3)
    run_dir.log("trainer").write_text("12:00:00 INFO    ready\n12:00:01 INFO    step 4\x1b[2J\n")
    with hold_run(run_dir.root, "rl"):
        first, *others = status_lines(run_dir.root)
    assert first.startswith(f"{run_dir.root}: running, `rl` (pid ")
    assert r"now         trainer: 12:00:01 INFO    step 4\x1b[2J" in others
    assert others[0].split() == ["step", "4", "of", "9"] and others[1].split()[:2] == ["reward", "0.500"]
    assert "checkpoint  step_000003" in others and "restarted   trainer (signal SIGKILL)" in others
    (run_dir.weights / step_name(9)).mkdir(parents=True)
    write_manifest(run_dir.weights / step_name(9), 9)
    for process in ("orchestrator", "trainer"):
        RunLog(run_dir, process).event("finished", step=9)
    assert status_lines(run_dir.root)[0] == f"{run_dir.root}: finished"
    assert not any(line.startswith("now ") for line in status_lines(run_dir.root))
    assert stop_run(run_dir.root) == f"nothing runs in {run_dir.root}; it is finished"


def test_the_state_tells_what_was_found(run_dir: RunDir) -> None:
    for step in (1, 2, 3):
        RunLog(run_dir, "trainer").metrics(step, {"grad_norm": 0.0})
    assert any(line.startswith("error       the gradient was 0") for line in status_lines(run_dir.root))
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    print_status(console, run_dir.root)
    shown = console.file.getvalue().splitlines()  # pyright: ignore[reportAttributeAccessIssue]
    begin = next(number for number, line in enumerate(shown) if line.startswith("error       the gradient was 0"))
    assert shown[begin + 1].startswith(" " * 12) and max(map(len, shown[: begin + 2])) <= 80


def test_only_a_run_of_rl_is_stopped(run_dir: RunDir, tmp_path: Path) -> None:
    with hold_run(run_dir.root, "trainer", ["trainer"]), pytest.raises(UserError, match="runs of `rl`"):
        stop_run(run_dir.root)
    with pytest.raises(UserError, match="is not the directory of a run"):
        stop_run(tmp_path)


@pytest.mark.parametrize("content", [b"\xff\x00", b"{", b"[]", b"{}", b'{"max_steps": "9"}'])
def test_a_damaged_configuration_is_told_in_one_line(run_dir: RunDir, content: bytes) -> None:
    (run_dir.config / "rl.json").write_bytes(content)
    for ask in (status_lines, stop_run):
        with pytest.raises(UserError, match=r"^\S+rl\.json (is|must)[^\n]*$"):
            ask(run_dir.root)


@pytest.mark.parametrize("content", ["{", "{}", '{"checkpoint": {"every": "x"}}'])
def test_a_run_whose_configuration_is_damaged_can_still_be_stopped(run_dir: RunDir, content: str) -> None:
    (run_dir.config / "rl.json").write_text(content)
    assert control._saving_s(run_dir) == CheckpointConfig().on_signal_timeout_s


def test_damaged_metrics_are_left_out_of_the_state(run_dir: RunDir) -> None:
    log = RunLog(run_dir, "orchestrator")
    log.metrics(4, {"reward/mean": 0.25})
    with run_dir.metrics.open("a") as file:
        for record in ({"reward/mean": None}, {"reward/mean": "x"}, {"time": "x"}):
            file.write(json.dumps({"step": 5, "process": "orchestrator", **record}) + "\n")
    told = "\n".join(status_lines(run_dir.root))
    assert "reward      0.250 (first 0.250)" in told and "last sign   2" in told
    assert f"damaged     {run_dir.metrics}: 3 of 4 lines have no valid time" in told


@pytest.mark.parametrize("number", ["1e300", "NaN", "Infinity", "1" + "0" * 400])
def test_a_time_that_is_none_is_told(run_dir: RunDir, number: str) -> None:
    RunLog(run_dir, "orchestrator").metrics(4, {"reward/mean": 0.25})
    assert "damaged" not in "\n".join(status_lines(run_dir.root))
    with run_dir.metrics.open("a") as file:
        file.write(f'{{"time": {number}, "process": "trainer", "step": 5}}\n')
    told = "\n".join(status_lines(run_dir.root))
    assert f"damaged     {run_dir.metrics}: 1 of 2 lines have no valid time" in told
    assert "step        5 of 9" in told and "last sign   2" in told


def test_a_number_that_no_float_holds_is_no_reward(run_dir: RunDir) -> None:
    run_dir.metrics.write_text(f'{{"time": 0, "process": "orchestrator", "step": 5, "reward/mean": 1{"0" * 400}}}\n')
    assert not any(line.startswith("reward") for line in status_lines(run_dir.root))


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl"])
def test_a_file_that_cannot_be_read_is_told_beside_the_state(run_dir: RunDir, name: str) -> None:
    damage = f"damaged     {name} is a folder, and a run has a file there; move it away"
    logs = f"logs        {run_dir.root / 'logs'}"
    with hold_run(run_dir.root, "rl"):
        (run_dir.root / name).mkdir()
        first, *others = status_lines(run_dir.root)
    assert status_lines(run_dir.root) == [f"{run_dir.root}: not running", damage, logs]
    assert first.startswith(f"{run_dir.root}: running, `rl` (pid ") and others == [damage, logs]


def test_a_run_whose_events_cannot_be_read_can_still_be_stopped(run_dir: RunDir) -> None:
    run_dir.events.mkdir()
    told = stop_run(run_dir.root)
    assert told.startswith(f"nothing runs in {run_dir.root}; it is damaged: events.jsonl is a folder, and a run has")


def test_a_file_in_the_place_of_the_checkpoints_is_told(run_dir: RunDir) -> None:
    run_dir.checkpoints.write_text("not a folder")
    told = "checkpoints is a file, and a run has a folder there; move it away"
    assert f"damaged     {told}" in status_lines(run_dir.root)
    assert stop_run(run_dir.root) == f"nothing runs in {run_dir.root}; it is damaged: {told}"


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(run_dir: RunDir) -> None:
    os.mkfifo(run_dir.metrics)
    assert "metrics.jsonl is neither a file nor a folder" in "\n".join(status_lines(run_dir.root))
