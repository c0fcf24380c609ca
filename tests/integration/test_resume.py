"""Killed at any moment and resumed, a deterministic run ends in the bits of one that was left alone."""

import os
import random
import shlex
import signal
import statistics
import subprocess
import time
from pathlib import Path

import pytest
from tests.integration.processes import ENVIRONMENT, Starter, children_of, is_alive, run_in_turn, wait_until
from tests.patience import PATIENCE

from tandem.trainer.checkpoints.history import newest_checkpoint
from tandem.utils.files import checksum, read_json_lines
from tandem.utils.manifest import MANIFEST
from tandem.utils.run_dir import RunDir, step_name


def weights_of(run_dir: RunDir, step: int) -> str:
    return checksum(run_dir.weights / step_name(step) / "model.safetensors")


def is_done(run_dir: RunDir, max_steps: int) -> bool:
    return (run_dir.weights / step_name(max_steps) / MANIFEST).exists()


def wait_for_steps(process: subprocess.Popen[str], run_dir: RunDir, count: int) -> None:
    """So many that the process does itself, or its end; the file may hold earlier ones."""
    started = time.time()

    def has_stepped() -> bool:
        steps = [line for line in read_json_lines(run_dir.metrics) if line["time"] > started]
        return process.poll() is not None or len(steps) >= count

    wait_until(has_stepped, 120, f"{count} steps")


def wait_until_it_rewinds(process: subprocess.Popen[str], run_dir: RunDir) -> None:
    """What a start writes when everything is checked and the directory is taken back to a checkpoint."""
    started, written = time.time(), run_dir.config / "command.txt"
    has_rewound = lambda: written.exists() and written.stat().st_mtime > started  # noqa: E731
    wait_until(lambda: process.poll() is not None or has_rewound(), 120, "the start")


def how_to_go_on(run_dir: RunDir) -> str:
    return "--clean" if newest_checkpoint(run_dir) is None else "--resume"


def kill(process: subprocess.Popen[str]) -> bool:
    """Whether it was still there to be killed. One that has ended must have done so well."""
    if process.poll() is not None:
        assert process.returncode == 0, process.communicate()[0]
        return False
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return True


def finish(starter: Starter, entrypoint: str, arguments: list[str], run_dir: RunDir) -> None:
    """Whatever state the run was left in."""
    done = starter.run(entrypoint, *arguments, how_to_go_on(run_dir))
    assert done.returncode == 0, done.stdout
    assert "resuming after step" in done.stdout or "is finished: all " in done.stdout, done.stdout


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory, load_script) -> Path:
    """Few: a process that starts again and again should not read them for long."""
    path = tmp_path_factory.mktemp("data") / "data.jsonl"
    load_script("reverse_text/make_data").main(path)
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:200]))
    return path


@pytest.fixture
def sft_arguments(tiny_model: Path, conversations: Path) -> list[str]:
    return [
        *("@", "examples/reverse_text/sft.toml", "--model.name", str(tiny_model), "--data.path", str(conversations)),
        *("--batch-size", "8", "--deterministic", "--threads", "1"),
        *("--checkpoint.every", "1", "--checkpoint.keep-last", "1"),
    ]


def test_sft_killed_again_and_again_ends_in_the_same_bits(starter, sft_arguments, tmp_path):
    """Three times between a step and the next, or in the checkpoint that follows each; once in its imports, once while
    it goes back to a checkpoint."""
    max_steps, num_kills, draw = 60, 5, random.Random(1)
    arguments = [*sft_arguments, "--max-steps", str(max_steps)]
    whole, cut = RunDir(tmp_path / "whole"), RunDir(tmp_path / "cut")
    done = starter.run("sft", *arguments, "--output-dir", str(whole.root))
    assert done.returncode == 0, done.stdout
    arguments += ["--output-dir", str(cut.root)]
    reached = []
    while (len(reached) < num_kills or not reached[-1]) and not is_done(cut, max_steps):
        process = starter.start("sft", *arguments, how_to_go_on(cut))
        if len(reached) == 2:  # while it starts: imports, or not even those
            time.sleep(draw.uniform(0, 2))
        elif len(reached) == 3:  # while it rewinds and loads
            wait_until_it_rewinds(process, cut)
        else:
            wait_for_steps(process, cut, draw.randint(2, 5))
        time.sleep(draw.uniform(0, 0.1))  # about as long as a step and its checkpoint take
        if kill(process):
            reached.append(newest_checkpoint(cut) or 0)
    assert len(reached) >= 2, "it is too fast to be killed"
    assert reached == sorted(reached), "a checkpoint was lost"
    assert len(set(reached)) > 1, "it was killed at the same point again and again"
    finish(starter, "sft", arguments, cut)
    assert weights_of(cut, max_steps) == weights_of(whole, max_steps)
    # Steps that were done again are there once, as they would have been.
    lines = read_json_lines(cut.metrics)
    assert [line["step"] for line in lines] == list(range(1, max_steps + 1))
    losses = [[line["loss"] for line in read_json_lines(run_dir.metrics)] for run_dir in (whole, cut)]
    assert losses[0] == losses[1] and statistics.fmean(losses[0][-5:]) < losses[0][0]
    assert len(list(cut.checkpoints.iterdir())) == 1


def test_sft_goes_on_with_another_number_of_ranks(sft_arguments, tmp_path):
    arguments = [*sft_arguments, "--scheduler.type", "constant", "--optimizer.lr", "1e-3"]
    whole, cut = RunDir(tmp_path / "whole"), RunDir(tmp_path / "cut")
    alone = ["sft", *arguments, "--max-steps", "9", "--output-dir", str(whole.root)]
    arguments += ["--output-dir", str(cut.root)]
    run_in_turn(["sft", *arguments, "--max-steps", "3"], num_ranks=2)
    assert len(list((cut.checkpoints / step_name(3) / "trainer").glob("shard_*"))) == 2
    said = run_in_turn(["sft", *arguments, "--max-steps", "6", "--resume"], alone)
    assert "resuming after step 3" in said, said
    assert len(list((cut.checkpoints / step_name(6) / "trainer").glob("shard_*"))) == 1
    run_in_turn(["sft", *arguments, "--max-steps", "9", "--resume"], num_ranks=2)
    expected, found = (read_json_lines(run_dir.metrics) for run_dir in (whole, cut))
    assert [line["step"] for line in found] == list(range(1, 10))
    # Two ranks add up in another order; without the moments, the loss would go another way after three steps.
    for name in ("loss", "grad_norm"):
        assert [line[name] for line in found] == pytest.approx([line[name] for line in expected], rel=1e-4)


def test_rl_killed_ends_in_the_same_bits(starter, rl_arguments, tmp_path):
    """Every second step has a checkpoint: a kill costs one or two steps, which are done again. In one process or in
    several, which makes no difference to the bits."""
    max_steps, num_kills, draw = 8, 2, random.Random(2)
    arguments = [
        *(*rl_arguments, "--orchestrator.prompts-per-step", "4", "--max-steps", str(max_steps)),
        *("--orchestrator.max-staleness", "0", "--deterministic", "--checkpoint.every", "2"),
    ]
    whole, cut = RunDir(tmp_path / "whole"), RunDir(tmp_path / "cut")
    done = starter.run("rl", *arguments, "--output-dir", str(whole.root))
    assert done.returncode == 0, done.stdout
    arguments += ["--output-dir", str(cut.root)]
    killed = 0
    while (killed < num_kills or newest_checkpoint(cut) is None) and not is_done(cut, max_steps):
        deployment = ("colocated", "split")[killed % 2]
        process = starter.start("rl", *arguments, "--deployment", deployment, how_to_go_on(cut))
        wait_for_steps(process, cut, draw.randint(5, 7))  # lines of orchestrator and trainer: two or three steps
        time.sleep(draw.uniform(0, 0.3))
        killed += kill(process)
    assert killed >= 1, "it is too fast to be killed"
    finish(starter, "rl", arguments, cut)
    assert len({weights_of(whole, step) for step in (max_steps - 1, max_steps)}) == 2
    assert weights_of(cut, max_steps) == weights_of(whole, max_steps)
    for step in range(1, max_steps + 1):
        assert cut.samples(step).read_text() == whole.samples(step).read_text()
    trained = [line for line in read_json_lines(cut.metrics) if line["process"] == "trainer"]
    assert [line["step"] for line in trained] == list(range(1, max_steps + 1))
    for name in ("mismatch_kl", "logprob_difference", "max/logprob_difference"):
        assert [line[name] for line in trained] == [0.0] * max_steps, "engine and trainer agree to the bit"


def interrupt(process: subprocess.Popen[str]) -> list[str]:
    """Ctrl-C, which ends its processes too; the command that the output says to go on with."""
    children = children_of(process.pid)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=60 * PATIENCE)
    assert process.returncode == 128 + signal.SIGINT, output
    assert not any(is_alive(pid) for pid in children.values())
    (line,) = [line for line in output.splitlines() if "continue with: " in line]
    assert "the newest checkpoint is " in line
    return shlex.split(line.partition("continue with: ")[2])


def go_on(words: list[str]) -> str:
    done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=240 * PATIENCE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_sft_goes_on_with_the_command_that_ctrl_c_names(starter, sft_arguments, tmp_path):
    run_dir = RunDir(tmp_path / "my run")
    process = starter.start("sft", *sft_arguments, "--max-steps", "100", "--output-dir", str(run_dir.root))
    wait_until(lambda: process.poll() is not None or newest_checkpoint(run_dir) is not None, 120, "a checkpoint")
    words = interrupt(process)
    assert words[-2:] == ["--resume", str(run_dir.root)]
    assert "resuming after step" in go_on(words)
    assert [line["step"] for line in read_json_lines(run_dir.metrics)] == list(range(1, 101))


def test_rl_goes_on_with_the_command_that_ctrl_c_names(starter, rl_arguments, tmp_path):
    run_dir = RunDir(tmp_path / "run")
    steps = ("--max-steps", "20", "--checkpoint.every", "1", "--orchestrator.prompts-per-step", "4")
    process = starter.start("rl", *rl_arguments, *steps)
    wait_until(lambda: process.poll() is not None or newest_checkpoint(run_dir) is not None, 120, "a checkpoint")
    words = interrupt(process)
    assert words[-2:] == ["--resume", str(run_dir.root)]
    assert "resuming after step" in go_on(words)
    trained = [line["step"] for line in read_json_lines(run_dir.metrics) if line["process"] == "trainer"]
    assert trained == list(range(1, 21))
