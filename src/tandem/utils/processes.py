"""Small process matters every entrypoint shares."""

import ctypes
import os
import signal
import sys
from collections.abc import Callable

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
