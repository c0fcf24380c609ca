"""SLURM's own commands: a job submitted, the states of jobs asked for."""

import getpass
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tandem.utils.errors import UserError

TIMEOUT_S = 120
# What `squeue` may say of a job that has not come to its end.
UNDER_WAY = {
    "PENDING": "pending",
    "REQUEUED": "pending",
    "REQUEUE_HOLD": "pending",
    "REQUEUE_FED": "pending",
    "SPECIAL_EXIT": "pending",
    "CONFIGURING": "running",
    "RUNNING": "running",
    "RESIZING": "running",
    "COMPLETING": "running",
    "STAGE_OUT": "running",
    "SIGNALING": "running",
    "STOPPED": "running",
    "SUSPENDED": "running",
}


def require_slurm() -> None:
    if shutil.which("sbatch") is None:
        raise UserError(
            "there is no `sbatch` here, so this machine submits no SLURM jobs; use a login node of a cluster"
        )


def submit(script: Path, options: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> str:
    """The id of the job. What sbatch refuses is told in its own words."""
    # A job does not inherit what says that this process is one.
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_J", "TANDEM_SLURM_J"))
    }
    done = subprocess.run(
        ["sbatch", "--parsable", *options, str(script)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        env=inherited | dict(environment or {}),
    )
    if done.returncode != 0:
        reason = " ".join(done.stderr.replace("sbatch: error: ", "").split())
        raise UserError(f"sbatch refused {script}: {reason}")
    return done.stdout.strip().partition(";")[0]


def max_array_size() -> int:
    """The most tasks of an array; SLURM's default where it does not say."""
    command = ["scontrol", "show", "config"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False).stdout
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", told, re.MULTILINE)
    return int(found[1]) if found else 1001


def jobs_under_way() -> dict[str, str]:
    """The user's jobs that wait or run, tasks of arrays one by one, as `pending` or `running`; none without SLURM."""
    return {job: UNDER_WAY[state] for job, state, _ in _queue()}


def job_below(folder: Path) -> tuple[str, str] | None:
    """A job that waits or runs and whose script lies below `folder`: its id, and `pending` or `running`."""
    found = [(job, UNDER_WAY[state]) for job, state, script in _queue() if script.startswith(f"{folder}/")]
    return found[0] if found else None


def _queue() -> list[tuple[str, str, str]]:
    """Id, state and script (or nothing) of each of the user's jobs that have not ended."""
    if shutil.which("squeue") is None:
        return []
    command = ["squeue", "--array", "--noheader", "--user", getpass.getuser(), "--format", "%i %T %o"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise UserError(f"squeue does not answer: {' '.join(done.stderr.split())}")
    jobs = [(*line.split(maxsplit=2), "", "", "") for line in done.stdout.splitlines()]
    return [(job, state, script) for job, state, script, *_ in jobs if state in UNDER_WAY]
