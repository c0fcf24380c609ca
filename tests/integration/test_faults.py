"""What happens when something dies or breaks and is not restarted: the run ends at once, whole, and says why."""

import os
import signal
import subprocess
import time

import pytest
from tests.integration.processes import children_of, is_alive, wait_until
from tests.patience import PATIENCE

from tandem.config.shared import CheckpointConfig
from tandem.utils.files import read_json_lines
from tandem.utils.run_dir import RunDir

LONG_RUN = ["--max-steps", "100000", "--orchestrator.prompts-per-step", "4", "--max-restarts", "0"]


@pytest.fixture
def running(starter, rl_arguments, tmp_path):
    """A run that has trained a few steps and would go on for hours, with the pids of its processes."""
    process = starter.start("rl", *rl_arguments, *LONG_RUN)
    run_dir = RunDir(tmp_path / "run")
    wait_until(lambda: len(read_json_lines(run_dir.metrics)) > 6 or process.poll() is not None, 120, "the first steps")
    assert process.poll() is None, process.communicate()[0]
    children = children_of(process.pid)
    assert set(children) == {"inference", "orchestrator", "trainer"}
    return process, children


def ended_within(process: subprocess.Popen[str], children: dict[str, int], seconds: float) -> str:
    started = time.monotonic()
    output, _ = process.communicate(timeout=(seconds + 5) * PATIENCE)
    assert time.monotonic() - started < seconds * PATIENCE
    assert not any(is_alive(pid) for pid in children.values())
    return output


@pytest.mark.parametrize("name", ["inference", "orchestrator", "trainer"])
def test_a_killed_process_ends_the_run_and_is_named(running, name, tmp_path):
    process, children = running
    os.kill(children[name], signal.SIGKILL)
    output = ended_within(process, children, 10)
    assert process.returncode == 1
    assert f"the {name} process ended with signal SIGKILL" in output
    assert str(RunDir(tmp_path / "run").log(name)) in output


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everything(running, number):
    process, children = running
    process.send_signal(number)
    output = ended_within(process, children, CheckpointConfig().on_signal_timeout_s + 10)
    assert process.returncode == 128 + number
    assert "stopped by" in output


def test_no_orphans_when_the_supervisor_itself_is_killed(running):
    process, children = running
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_alive(pid) for pid in children.values()), 10, "the children to end")


def test_a_process_that_fails_is_shown_with_its_last_lines(starter, rl_arguments, tmp_path):
    module = tmp_path / "broken_env.py"
    module.write_text(
        "from tandem.envs.reverse_text import ReverseText\n"
        "class Broken(ReverseText):\n"
        "    async def score(self, task, completion):\n"
        "        raise RuntimeError('the judge is asleep')\n"
    )
    starter.add_to_path(tmp_path)
    done = starter.run(
        "rl",
        *rl_arguments,
        *("--orchestrator.env.id", "broken_env:Broken", "--no-orchestrator.env.check"),
    )
    assert done.returncode == 1
    assert "the orchestrator process ended with exit code 1" in done.stdout
    assert "the judge is asleep" in done.stdout


def test_a_trainer_that_waits_in_vain_says_for_whom(starter, warm_model, tmp_path):
    done = starter.run(
        "trainer", "--model.name", str(warm_model), "--output-dir", str(tmp_path), "--rollout-timeout-s", "0.5"
    )
    assert done.returncode != 0
    assert "waited 0.5 s for the orchestrator's batch" in done.stdout


def test_an_orchestrator_that_waits_in_vain_says_for_whom(starter, warm_model, tmp_path, free_port):
    done = starter.run(
        "orchestrator",
        *("--model.name", str(warm_model), "--output-dir", str(tmp_path), "--client.startup-timeout-s", "0.5"),
        *("--client.base-url", f"http://127.0.0.1:{free_port}"),
    )
    assert done.returncode != 0
    assert "waited 0.5 s for the inference server" in done.stdout


def test_an_orchestrator_without_a_trainer_says_for_whom_it_waits(starter, rl_arguments, tmp_path):
    assert starter.run("rl", *rl_arguments, "--dry-run").returncode == 0
    folder = tmp_path / "run" / "dry_run"
    starter.start("inference", "@", str(folder / "inference.json"))
    done = starter.run("orchestrator", "@", str(folder / "orchestrator.json"), "--weights-timeout-s", "3")
    assert done.returncode != 0
    assert "waited 3 s for the groups of step 3" in done.stdout
    assert "weights after version 0 from the trainer" in done.stdout
