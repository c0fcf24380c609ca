"""Ends what a run has started, however its supervisor ended: started by the supervisor, apart from everything else.

The kernel ends the supervisor's own children with it, but not theirs: a reward function's subprocess would live on.
All of them carry a mark in their environment. This process waits until the supervisor closes its pipe, which the
kernel does for one that was killed, and then kills whoever carries the mark.

    python -m tandem.launch.guard MARK      (standard input: the pipe)
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

MARK = "TANDEM_STARTED_BY"
SWEEP_S = 10.0


class Guard:
    """The supervisor's end of it."""

    def __init__(self, mark: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tandem.launch.guard", mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # whoever reads the supervisor's would wait for this process as well
            start_new_session=True,  # what is sent to the supervisor's group is not meant for it
        )

    def close(self) -> None:
        """Have the rest ended now."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


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
        signal.signal(number, signal.SIG_IGN)  # of a whole job: it has to outlive the supervisor
    sys.stdin.buffer.read()
    if Path("/proc").exists():
        sweep(sys.argv[1])


if __name__ == "__main__":
    main()
