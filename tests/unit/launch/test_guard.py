"""Nothing that a command has started outlives it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tandem.launch.guard import MARK, guarded
from tandem.utils.processes import process_state

# A child in a session of its own, whose own child is found by the mark alone.
START = """\
import subprocess, sys
script = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=subprocess.DEVNULL).pid, flush=True)"
subprocess.run([sys.executable, "-c", script], start_new_session=True, check=True)
"""
HOLD = f"""\
import sys, time
from tandem.launch.guard import guarded
with guarded():
    exec({START!r})
    time.sleep(1000)
"""


def is_gone(pid: int) -> bool:
    return process_state(pid) in (None, "Z")


def test_at_the_end_of_the_block(tmp_path: Path) -> None:
    with guarded():
        done = subprocess.run([sys.executable, "-c", START], stdout=subprocess.PIPE, text=True, check=True)
        pid = int(done.stdout)
        assert not is_gone(pid)
    assert is_gone(pid)
    assert MARK not in os.environ and process_state(os.getpid()) == "R"


def test_when_the_process_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert not is_gone(pid)
    os.killpg(process.pid, signal.SIGKILL)  # with its whole group: the guard is not in it
    process.communicate()
    deadline = time.monotonic() + 60
    while not is_gone(pid):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_others_started_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "1000"]) as other:
        with guarded():
            pass
        assert not is_gone(other.pid)
        other.kill()
