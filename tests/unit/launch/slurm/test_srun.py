"""A command under srun is told to end, once, where srun would kill it. The programs of SLURM are shell scripts here."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.processes import wait_until

from tandem.launch.slurm.srun import MODULE
from tandem.utils.processes import REPEATED_WITHIN_S

# Notes its pid, runs the command in the background, and kills it on SIGTERM, as srun does.
SRUN = """#!/bin/bash
echo "$1" > {folder}/name
shift 2
"$@" &
task=$!
echo $task > {folder}/task
trap 'kill -KILL $task $(cat {folder}/command); exit 9' TERM
wait $task; code=$?
exit $code
"""
SQUEUE = """#!/bin/bash
echo "7.0 other"
sed 's/--job-name=/7.1 /' {folder}/name
"""
SCANCEL = """#!/bin/bash
echo "$@" >> {folder}/cancelled
kill -URG $(cat {folder}/task)
"""
# Told to end, it takes until it is allowed to.
COMMAND = """
echo $$ > {folder}/command
echo $PET_NODE_RANK > {folder}/node_rank
trap 'echo told >> {folder}/told' TERM
touch {folder}/ready
until [ -e {folder}/told ] && [ -e {folder}/may_end ]; do sleep 0.01; done
exit 143
"""
Start = Callable[[], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    def start() -> "subprocess.Popen[bytes]":
        for name, text in {"srun": SRUN, "squeue": SQUEUE, "scancel": SCANCEL}.items():
            (tmp_path / name).write_text(text.format(folder=tmp_path))
            (tmp_path / name).chmod(0o755)
        command = ["bash", "-c", COMMAND.format(folder=tmp_path)]
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)}
        environment |= {"SLURM_JOB_ID": "7", "SLURM_NODEID": "3"}
        process = subprocess.Popen([sys.executable, "-m", MODULE, "--nodes=1", "--", *command], env=environment)
        wait_until((tmp_path / "ready").exists, 20, "the command")
        return process

    return start


def test_the_command_is_told_once_and_may_take_its_time(start: Start, tmp_path: Path) -> None:
    process = start()
    process.send_signal(signal.SIGTERM)
    wait_until((tmp_path / "told").exists, 20, "the signal")
    assert process.poll() is None
    (tmp_path / "may_end").touch()
    assert process.wait(60) == 143
    assert (tmp_path / "cancelled").read_text() == "--signal=URG 7.1\n", "no other step of the job"
    assert (tmp_path / "told").read_text() == "told\n"
    assert (tmp_path / "node_rank").read_text() == "3\n", "torchrun has to know which node it is on"


def test_told_again_the_step_is_killed(start: Start, tmp_path: Path) -> None:
    process = start()
    process.send_signal(signal.SIGTERM)
    wait_until((tmp_path / "told").exists, 20, "the signal")
    with pytest.raises(subprocess.TimeoutExpired):  # what comes at once is the same signal
        process.wait(1.5 * REPEATED_WITHIN_S)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 9


def test_the_step_ends_with_the_process_that_started_it(start: Start, tmp_path: Path) -> None:
    process = start()
    command = Path("/proc") / (tmp_path / "command").read_text().strip()
    process.kill()
    process.wait()
    wait_until(lambda: not command.exists(), 20, "the command to be killed")
