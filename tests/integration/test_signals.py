"""A run that is asked to end saves a checkpoint first, and one that is killed leaves nobody behind."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests.integration.processes import Starter, children_of, is_alive, run_in_turn, wait_until

from tandem.trainer.checkpoints.history import newest_checkpoint
from tandem.utils.files import checksum, read_json_lines, write_atomic
from tandem.utils.metrics import read_metrics
from tandem.utils.run_dir import RunDir, step_name

PATIENCE_S = 240


def wait_for_step(process: subprocess.Popen[str], run_dir: RunDir, step: int) -> None:
    def has_come() -> bool:
        return process.poll() is not None or max((line["step"] for line in read_metrics(run_dir)), default=0) >= step

    wait_until(has_come, PATIENCE_S, f"step {step}")
    assert process.poll() is None, process.communicate()[0]


def weights_of(run_dir: RunDir, step: int) -> str:
    return checksum(run_dir.weights / step_name(step) / "model.safetensors")


def events(run_dir: RunDir, name: str) -> list[dict[str, object]]:
    return [event for event in read_json_lines(run_dir.events) if event["event"] == name]


@pytest.fixture
def sft_arguments(tiny_model: Path, tmp_path: Path, load_script) -> list[str]:
    data = tmp_path / "data.jsonl"
    load_script("reverse_text/make_data").main(data)
    data.write_text("".join(data.read_text().splitlines(keepends=True)[:200]))
    return [
        *("@", "examples/reverse_text/sft.toml", "--model.name", str(tiny_model), "--data.path", str(data)),
        *("--batch-size", "8", "--deterministic", "--threads", "1", "--scheduler.type", "constant"),
    ]


def test_sft_saves_and_goes_on_in_the_same_bits(starter: Starter, sft_arguments, tmp_path: Path) -> None:
    """Stopped by one signal, then by the other. No checkpoint was due: those of the signals are the only ones."""
    cut, whole = RunDir(tmp_path / "cut"), RunDir(tmp_path / "whole")
    arguments, saved = [*sft_arguments, "--output-dir", str(cut.root)], 0
    for number in (signal.SIGINT, signal.SIGTERM):
        process = starter.start("sft", *arguments, "--max-steps", "100000", *(["--resume"] if saved else []))
        wait_for_step(process, cut, saved + 3)
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 128 + number, output
        assert not saved or f"resuming after step {saved}" in output
        saved = newest_checkpoint(cut)
        assert saved is not None and [line["step"] for line in read_metrics(cut)] == list(range(1, saved + 1))
        assert f"stopped by {number.name}; the checkpoint of step {saved} is saved" in output
        stopped = events(cut, "stopped")[-1]
        assert (stopped["step"], stopped["signal"]) == (saved, number.name)

    last = str(saved + 3)
    left_alone = ["sft", *sft_arguments, "--max-steps", last, "--output-dir", str(whole.root)]
    said = run_in_turn(["sft", *arguments, "--max-steps", last, "--resume"], left_alone)
    assert f"resuming after step {saved}" in said, said
    assert weights_of(cut, saved + 3) == weights_of(whole, saved + 3)


def test_ranks_agree_on_the_step_that_is_saved(starter: Starter, sft_arguments, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    arguments = [*sft_arguments, "--output-dir", str(run_dir.root), "--parallel.ranks", "2"]
    process = starter.start("sft", *arguments, "--max-steps", "100000")
    wait_for_step(process, run_dir, 3)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE_S)
    saved = newest_checkpoint(run_dir)
    assert saved is not None, output
    assert [line["step"] for line in read_metrics(run_dir)] == list(range(1, saved + 1))
    assert len(list((run_dir.checkpoints / step_name(saved) / "trainer").glob("shard_*"))) == 2
    done = starter.run("sft", *arguments, "--max-steps", str(saved + 2), "--resume")
    assert done.returncode == 0 and f"resuming after step {saved}" in done.stdout, done.stdout
    assert not list(run_dir.root.glob("*.lock"))


@pytest.fixture
def on_policy(tiny_model: Path, tmp_path: Path, free_port: int) -> list[str]:
    """The untrained model is right in a letter now and then: enough to learn from, and nothing has to be waited for."""
    return [
        *("@", "examples/reverse_text/rl.toml", "--model.name", str(tiny_model), "--output-dir", str(tmp_path / "run")),
        *("--inference.server.port", str(free_port), "--orchestrator.eval.num-prompts", "4"),
        *("--orchestrator.prompts-per-step", "4", "--orchestrator.max-staleness", "0", "--deterministic"),
        *("--trainer.scheduler.type", "constant"),
    ]


def test_rl_saves_and_goes_on_in_the_same_bits(starter: Starter, on_policy, tmp_path: Path) -> None:
    cut, whole = RunDir(tmp_path / "cut"), RunDir(tmp_path / "whole")
    arguments = [*on_policy, "--output-dir", str(cut.root)]
    process = starter.start("rl", *arguments, "--max-steps", "100000")
    wait_for_step(process, cut, 1)
    assert process.stdout is not None
    process.stdout.close()  # as in `rl | head`: it trains on
    wait_for_step(process, cut, max(line["step"] for line in read_metrics(cut)) + 3)
    children = children_of(process.pid)
    process.send_signal(signal.SIGHUP)  # and then the window is closed
    assert process.wait(PATIENCE_S) == 143
    assert len(children) == 3 and not any(is_alive(pid) for pid in children.values())
    (stopped,) = events(cut, "stopped")
    saved = newest_checkpoint(cut)
    assert saved is not None and saved >= 4 and stopped["step"] == saved

    last = str(saved + 3)
    done = starter.run("rl", *arguments, "--max-steps", last, "--resume")
    assert done.returncode == 0 and f"resuming after step {saved}" in done.stdout, done.stdout
    done = starter.run("rl", *on_policy, "--max-steps", last, "--output-dir", str(whole.root))
    assert done.returncode == 0, done.stdout
    assert weights_of(cut, saved + 3) == weights_of(whole, saved + 3) != weights_of(whole, saved + 2)


def drop_lines(path: Path, wanted: list[str]) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    write_atomic(path, b"".join(line for line in lines if not all(word in line.decode() for word in wanted)))


def test_a_finished_run_is_finished_and_missing_pieces_are_made(starter: Starter, on_policy, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    arguments = [*on_policy, "--max-steps", "2", "--checkpoint.every", "1"]
    done = starter.run("rl", *arguments)
    assert done.returncode == 0, done.stdout
    rewards = [line["eval/reward"] for line in read_metrics(run_dir) if "eval/reward" in line]
    before = run_dir.events.read_bytes()
    done = starter.run("rl", *arguments, "--resume")
    assert done.returncode == 0 and "is finished: all 2 steps are done" in done.stdout, done.stdout
    assert run_dir.events.read_bytes() == before, "nothing was started"

    # As if it had been killed after the last step, while it was evaluated; and a bit of the weights is damaged.
    drop_lines(run_dir.events, ['"orchestrator"', '"finished"'])
    drop_lines(run_dir.metrics, ['"eval/reward"', '"step": 2'])
    weights = run_dir.weights / step_name(2) / "model.safetensors"
    expected = checksum(weights)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    done = starter.run("rl", *arguments, "--resume")
    assert done.returncode == 0, done.stdout
    assert [line["eval/reward"] for line in read_metrics(run_dir) if "eval/reward" in line] == rewards
    assert checksum(weights) == expected


SCORES_BY_SUBPROCESS = """\
import pathlib, subprocess, sys
from tandem.envs.reverse_text import ReverseText
class Slow(ReverseText):
    async def score(self, task, completion):
        for number in range(2):
            child = subprocess.Popen(["sleep", "1000"], start_new_session=bool(number))
            with open(pathlib.Path(__file__).with_name("pids"), "a") as file:
                file.write(f"{child.pid}\\n")
        return await super().score(task, completion)
"""


@pytest.mark.parametrize("while_it_runs", [False, True], ids=["at preflight", "while it runs"])
def test_a_killed_run_leaves_no_children_of_its_scoring_code(
    starter: Starter, on_policy, tmp_path: Path, while_it_runs: bool
) -> None:
    (tmp_path / "slow_env.py").write_text(SCORES_BY_SUBPROCESS)
    starter.environment["PYTHONPATH"] = f"{tmp_path}:{starter.environment.get('PYTHONPATH', '')}"
    process = starter.start(
        "rl",
        *(*on_policy, "--orchestrator.env.id", "slow_env:Slow", "--orchestrator.eval.num-prompts", "2"),
        *("--orchestrator.prompts-per-step", "1", "--orchestrator.group-size", "2", "--max-steps", "1000"),
    )
    pids = tmp_path / "pids"
    wait_until(lambda: pids.exists() or process.poll() is not None, PATIENCE_S, "the first score")
    if while_it_runs:
        wait_for_step(process, RunDir(tmp_path / "run"), 1)
    assert process.poll() is None, process.communicate()[0]
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(int(pid)) for pid in pids.read_text().split()), 30, "the children to end")


def test_a_stopped_supervisor_is_noticed_and_a_killed_one_takes_all_with_it(
    starter: Starter, on_policy, tmp_path: Path
) -> None:
    run_dir = RunDir(tmp_path / "run")
    process = starter.start("rl", *on_policy, "--max-steps", "100000")
    wait_for_step(process, run_dir, 1)
    children = children_of(process.pid)
    process.send_signal(signal.SIGSTOP)
    reached = max(line["step"] for line in read_metrics(run_dir))
    wait_until(lambda: max(line["step"] for line in read_metrics(run_dir)) > reached + 2, PATIENCE_S, "more steps")
    wait_until(lambda: "is stopped: the run continues" in run_dir.log("trainer").read_text(), PATIENCE_S, "a warning")
    held = json.loads((run_dir.root / "trainer.lock").read_bytes())["beat"]
    wait_until(
        lambda: json.loads((run_dir.root / "trainer.lock").read_bytes())["beat"] != held, PATIENCE_S, "a fresh lock"
    )
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in children.values()), 30, "the children to end")


def test_a_live_run_is_left_alone(starter: Starter, sft_arguments, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    arguments = [*sft_arguments, "--output-dir", str(run_dir.root)]
    live = starter.start("sft", *arguments, "--max-steps", "100000", "--checkpoint.every", "1")
    wait_for_step(live, run_dir, 2)
    for flag in ("--clean", "--resume", "--seed=1"):
        done = starter.run("sft", *arguments, flag)
        assert done.returncode == 2, done.stdout
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("sft: ")]
        assert f"is in use by `sft` (pid {live.pid} on " in line and f"ps -fp {live.pid}" in line
        wait_for_step(live, run_dir, max(line["step"] for line in read_metrics(run_dir)) + 2)
        steps = [line["step"] for line in read_metrics(run_dir)]
        assert steps == list(range(1, len(steps) + 1)), f"lines were lost by {flag}"


def test_of_two_at_once_one_wins(starter: Starter, sft_arguments, tmp_path: Path) -> None:
    arguments = [*sft_arguments, "--output-dir", str(tmp_path / "run"), "--max-steps", "100000"]
    both = [starter.start("sft", *arguments) for _ in range(2)]
    wait_until(lambda: any(process.poll() is not None for process in both), PATIENCE_S, "one to be refused")
    (loser,) = [process for process in both if process.poll() is not None]
    (winner,) = [process for process in both if process is not loser]
    assert loser.returncode == 2, loser.communicate()[0]
    assert f"is in use by `sft` (pid {winner.pid} on " in loser.communicate()[0]
    wait_for_step(winner, RunDir(tmp_path / "run"), 3)


def test_by_hand_there_is_one_trainer(starter: Starter, tiny_model: Path, tmp_path: Path) -> None:
    arguments = ["--model.name", str(tiny_model), "--output-dir", str(tmp_path / "run")]
    trainer = starter.start("trainer", *arguments)
    lock = tmp_path / "run" / "trainer.lock"
    wait_until(lambda: lock.exists() or trainer.poll() is not None, PATIENCE_S, "the lock")
    done = starter.run("trainer", *arguments)
    assert done.returncode == 2 and f"is in use by `trainer` (pid {trainer.pid} on " in done.stdout, done.stdout
    os.killpg(trainer.pid, signal.SIGKILL)
    trainer.wait()
    done = starter.run("trainer", *arguments, "--rollout-timeout-s", "0.5")
    assert done.returncode != 0 and "waited 0.5 s for the orchestrator's batch" in done.stdout, done.stdout


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_a_place_that_cannot_be_written_is_one_line(starter: Starter, sft_arguments, flags: list[str]) -> None:
    done = starter.run("sft", *sft_arguments, "--output-dir", "/proc/run", *flags)
    assert done.returncode == 2, done.stdout
    (line,) = [line for line in done.stdout.splitlines() if " INFO " not in line]
    assert line.startswith("sft: output_dir = '/proc/run' cannot be written")
