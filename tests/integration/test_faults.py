"""What happens when something dies or breaks and is not restarted: the run ends at once, whole, and says why."""

import os
import signal
import subprocess
import time

import pytest
from tests.integration.processes import children_of, is_alive, wait_until
from tests.patience import PATIENCE

from tandem.utils.files import read_json_lines
from tandem.utils.run_dir import RunDir

LONG_RUN = [
    *("--max-steps", "100000", "--orchestrator.prompts-per-step", "4", "--orchestrator.eval.num-prompts", "4"),
    *("--max-restarts", "0"),
]


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


def test_a_killed_process_ends_the_run_and_is_named(running, tmp_path):
    """The server, whose return the others would await for minutes; the supervisor treats all of them alike."""
    process, children = running
    os.kill(children["inference"], signal.SIGKILL)
    output = ended_within(process, children, 10)
    assert process.returncode == 1
    assert "the inference process ended with signal SIGKILL" in output
    assert str(RunDir(tmp_path / "run").log("inference")) in output


def test_an_orchestrator_that_waits_in_vain_says_for_whom(starter, warm_model, tmp_path, free_port):
    done = starter.run(
        "orchestrator",
        *("--model.name", str(warm_model), "--output-dir", str(tmp_path), "--client.startup-timeout-s", "0.5"),
        *("--client.base-url", f"http://127.0.0.1:{free_port}"),
    )
    assert done.returncode != 0
    assert "waited 0.5 s for the inference server" in done.stdout


def test_an_orchestrator_without_a_trainer_says_for_whom_it_waits(starter, rl_arguments, tmp_path):
    small = ("--orchestrator.prompts-per-step", "2", "--orchestrator.eval.num-prompts", "2")
    assert starter.run("rl", *rl_arguments, *small, "--dry-run").returncode == 0
    folder = tmp_path / "run" / "dry_run"
    starter.start("inference", "@", str(folder / "inference.json"))
    orchestrate = ("orchestrator", "@", str(folder / "orchestrator.json"), "--output-dir")
    refused = starter.run(*orchestrate, str(tmp_path / "elsewhere"))
    assert refused.returncode == 2 and "--server.weight-roots" in refused.stdout, refused.stdout
    for timeout_s in (1, 4, 16, 64):  # a slow machine may take longer than that for the groups of a step
        own = tmp_path / "run" / f"within_{timeout_s}_s"
        done = starter.run(*orchestrate, str(own), "--weights-timeout-s", str(timeout_s))
        assert done.returncode != 0
        if f"waited {timeout_s} s for the groups of step 3" in done.stdout:
            break
        assert f"waited {timeout_s} s for the groups of step " in done.stdout, done.stdout
    else:
        pytest.fail("it never came to step 3")
    assert "weights after version 0 from the trainer" in done.stdout
