"""Ends what a command has started, however the command itself ended. `rl` does everything under one.

The kernel ends the supervisor's own children with it, but not theirs: a reward function's subprocess would live on.
All of them carry a mark in their environment. The guard, a process of its own, waits until the command closes its pipe,
which the kernel does for one that was killed, and then kills whoever carries the mark.

    python -m tandem.launch.guard MARK      (standard input: the pipe)
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MARK = "TANDEM_STARTED_BY"
SWEEP_S = 10.0


@contextmanager
def guarded() -> Iterator[None]:
    """Nothing that is started inside outlives this block, or this process."""
    mark = uuid.uuid4().hex
    guard = subprocess.Popen(
        [sys.executable, "-m", "tandem.launch.guard", mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,  # whoever reads this process's would wait for the guard as well
        start_new_session=True,  # what is sent to this process's group is not meant for it
    )
    assert guard.stdin is not None
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]
        guard.stdin.close()
        guard.wait()


def marked(mark: str) -> list[int]:
    """The processes that carry the mark, but for this one."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with suppress(OSError):
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
    return found


def sweep(mark: str) -> None:
    """Until none is left: they may be starting others."""
    deadline = time.monotonic() + SWEEP_S
    while (pids := marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to a whole job: it has to outlive the others
    sys.stdin.buffer.read()
    if Path("/proc").exists():
        sweep(sys.argv[1])


if __name__ == "__main__":
    main()
