"""srun for commands that end by themselves on SIGTERM, the trainer with a checkpoint: srun would kill them at once.

    this process ──► srun ──► on each node: a shell ──► the command
          └──── scancel --signal=URG ───────►└─ SIGTERM ─►┘

SLURM signals all processes of a step. SIGURG means nothing to any of them but the shell, so that the command is told to
end once. Whoever tells this process a second time, or kills it, has srun kill the step.

    python -m tandem.launch.slurm.srun --nodes=2 … -- COMMAND …
"""

import os
import signal
import subprocess
import sys
import time
from functools import partial
from types import FrameType

from tandem.launch.slurm.commands import TIMEOUT_S
from tandem.utils.processes import REPEATED_WITHIN_S, die_with_parent, run_entrypoint

MODULE = "tandem.launch.slurm.srun"
POLL_S = 0.1
# PET_NODE_RANK is torchrun's own name for --node-rank: its first node, which the others connect to, is srun's first.
TASK = """\
export PET_NODE_RANK=$SLURM_NODEID
trap 'kill -TERM $command 2> /dev/null' URG
"$@" &
command=$!
wait $command
code=$?
while kill -0 $command 2> /dev/null; do wait $command; code=$?; done
exit $code"""


def main() -> None:
    run_entrypoint("srun", lambda: run(sys.argv[1:]))


def run(arguments: list[str]) -> None:
    """Exits as srun does."""
    told: list[float] = []  # when

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if not told or time.monotonic() - told[-1] > REPEATED_WITHIN_S:
            told.append(time.monotonic())

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    split = arguments.index("--")
    name = f"tandem-{os.getpid()}"
    command = [f"--job-name={name}", *arguments[:split], "bash", "-c", TASK, "task", *arguments[split + 1 :]]
    # In a session of its own: whoever signals this process's group does not reach it.
    end_too = partial(die_with_parent, os.getpid(), signal.SIGTERM)
    srun = subprocess.Popen(["srun", *command], start_new_session=True, preexec_fn=end_too)
    answered = 0
    while srun.poll() is None:
        if answered < len(told):
            answered += 1
            if answered > 1 or not ask_to_end(name):
                srun.terminate()
        try:
            srun.wait(POLL_S)
        except subprocess.TimeoutExpired:
            continue
    raise SystemExit(srun.returncode if srun.returncode >= 0 else 128 - srun.returncode)


def ask_to_end(name: str) -> bool:
    """Whether there is such a step of this job, and it was told."""
    listed = _call("squeue", "--noheader", "--steps", f"--jobs={os.environ['SLURM_JOB_ID']}", "--format=%i %j")
    steps = [step for step, _, found in (line.strip().partition(" ") for line in listed.splitlines()) if found == name]
    for step in steps:
        _call("scancel", "--signal=URG", step)
    return bool(steps)


def _call(*command: str) -> str:
    """What a program of SLURM prints; it says itself what went wrong."""
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=False).stdout


if __name__ == "__main__":
    main()
