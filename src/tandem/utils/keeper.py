"""Runs a command, and ends all that it has started when it ends, when our parent ends, or at END_SIGNAL.

    python -I -S keeper.py PARENT_PID COMMAND…       utils/processes.py: `kept` makes this line

The keeper is a subreaper: a process below it that loses its parent becomes the keeper's child, whether or not it has a
session of its own, so none gets away. Other signals are passed on to the command, and the keeper ends as the command
does. Elsewhere than on Linux, the command takes the place of this process. A script that imports little, so that it
starts fast.
"""

import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

END_SIGNAL = signal.SIGQUIT
SWEEP_S = 10.0  # a process that another user owns, or that waits for a disk, may not end
LOOK_S = 0.005
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
KILLED = int(signal.SIGKILL)  # as the status of a process


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on. Linux only; elsewhere none are found."""
    children: dict[int, list[int]] = {}
    with suppress(FileNotFoundError):
        for name in os.listdir("/proc"):  # noqa: PTH208
            if name.isdigit() and (fields := stat_fields(int(name))):
                children.setdefault(int(fields[1]), []).append(int(name))
    found = children.get(pid, [])[:]
    for child in found:  # grows as it is walked
        found += children.get(child, [])
    return found


def stat_fields(pid: int) -> list[str]:
    """What /proc/pid/stat says after the name of the process, which may hold anything."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def start(command: Sequence[str]) -> int:
    """The command, as a child that the kernel ends with us. Signals are blocked here from now on."""
    keeper = os.getpid()
    libc = ctypes.CDLL(None)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    child = os.fork()
    if child == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if os.getppid() == keeper:
            os.execv(command[0], list(command))
        os._exit(1)
    for name in os.listdir("/proc/self/fd"):  # what the command closes is closed  # noqa: PTH208
        with suppress(OSError):
            os.close(int(name))
    return child


def keep(child: int) -> int:
    """The status with which the child ended."""
    while (number := signal.sigwait(signal.valid_signals())) != END_SIGNAL:
        if number != signal.SIGCHLD:
            os.kill(child, number)
            continue
        for pid, status in reaped():
            if pid == child:
                return status
    return KILLED


def reaped() -> Iterator[tuple[int, int]]:
    """Children that have ended, with their status. ChildProcessError where no child is left, ended or not."""
    while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
        yield ended


def end_all() -> None:
    """Kill whatever is below, until nothing is: it may be starting others."""
    deadline = time.monotonic() + SWEEP_S
    with suppress(ChildProcessError):
        while time.monotonic() < deadline:
            for _ in reaped():
                pass
            for pid in descendants(os.getpid()):
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(LOOK_S)


def leave_with(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the command has written one, if any
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-code])
        with suppress(OSError):  # those of SIGKILL cannot be set
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if not sys.platform.startswith("linux"):
        os.execv(command[0], list(command))
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, END_SIGNAL)
    if os.getppid() != parent:
        raise SystemExit("the process that started this one is gone")
    status = keep(start(command))
    end_all()
    leave_with(status)


if __name__ == "__main__":
    main()
