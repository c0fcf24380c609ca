"""Small process matters every entrypoint shares."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.utils.errors import UserError

SUPERVISOR_PID = "TANDEM_SUPERVISOR_PID"
PR_SET_PDEATHSIG = 1


def die_with_supervisor() -> None:
    """Started by a supervisor that is killed, this process is ended by the kernel: no orphans. Linux only."""
    supervisor = os.environ.get(SUPERVISOR_PID)
    if supervisor is not None and not die_with_parent(int(supervisor)):
        raise SystemExit("the supervisor is gone")


def die_with_parent(parent: int) -> bool:
    """However the process `parent` ends, this one ends with it. False if it is not our parent, or no longer.

    Linux only; elsewhere nothing is promised.
    """
    if not sys.platform.startswith("linux"):
        return True
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process and all that it started, and wait for its end. Of one that has ended nothing is known any more."""
    if process.poll() is not None:
        return
    tree = descendants(process.pid)
    process.kill()
    process.wait()
    for pid in tree:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on. Linux only; elsewhere none are found."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parent = int(stat.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = children.get(pid, [])[:]
    for child in found:  # grows as it is walked
        found += children.get(child, [])
    return found


def is_first_rank() -> bool:
    """Of the processes that torchrun started, the one that writes what is there once; true without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def run_entrypoint(name: str, body: Callable[[], None]) -> None:
    """Run a process's main part; a user's mistake becomes one line on standard error and exit code 2."""
    die_with_supervisor()
    try:
        body()
    except UserError as error:
        print(f"{name}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
