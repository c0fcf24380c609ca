"""How a process leaves."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tandem.utils import keeper
from tandem.utils.errors import BrokenRunDirectory, Diverged, UserError
from tandem.utils.processes import (
    SUPERVISOR_PID,
    UNUSABLE,
    Stopped,
    cleaning_up_on_sigterm,
    descendants,
    die_with_supervisor,
    kept,
    kill_tree,
    process_exists,
    process_state,
    run_entrypoint,
    start_time,
    usable_cores,
)


def leaving(error: BaseException):
    def body() -> None:
        raise error

    return body


def test_a_users_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_entrypoint("rl", leaving(UserError("seq_len = 3 is too short")))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "rl: seq_len = 3 is too short\n"


def test_errors_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (UserError("\x1b[2J"), Stopped(15, "\x1b[2J"), Diverged("\x1b[2J"), RuntimeError("\x1b[2J")):
        with pytest.raises(SystemExit):
            run_entrypoint("rl", leaving(error))
        shown = capsys.readouterr().err
        assert r"\x1b[2J" in shown and "\x1b" not in shown


def test_ctrl_c_is_exit_code_130_and_other_errors_are_shown_with_where_they_came_from(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        run_entrypoint("rl", leaving(KeyboardInterrupt()))
    assert caught.value.code == 130
    with pytest.raises(SystemExit) as caught:
        run_entrypoint("rl", leaving(RuntimeError("a bug")))
    assert caught.value.code == 1
    shown = capsys.readouterr().err
    assert "in body" in shown and shown.endswith("RuntimeError: a bug\n")


def test_an_error_of_any_length_stays_readable(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (RuntimeError("x" * 200_000), RuntimeError("line\n" * 50_000), UserError("y" * 200_000)):
        with pytest.raises(SystemExit):
            run_entrypoint("rl", leaving(error))
        shown = capsys.readouterr().err
        assert len(shown) < 10_000 and "left out]" in shown


def test_a_full_disk_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_entrypoint("trainer", leaving(OSError(errno.ENOSPC, "No space left on device", "/run/weights")))
    assert caught.value.code == UNUSABLE
    assert capsys.readouterr().err == "trainer: [Errno 28] No space left on device: '/run/weights'\n"


def test_a_run_directory_that_broke_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_entrypoint("sft", leaving(BrokenRunDirectory("it was renamed")))
    assert (caught.value.code, capsys.readouterr().err) == (UNUSABLE, "sft: it was renamed\n")


# Waits as a command does that checks what it was given. Its clean-up goes on for longer than signals are repeated.
WAITING = """\
import sys, time
from pathlib import Path
from tandem.utils.processes import run_entrypoint
from tandem.utils.run_lock import hold_run

def check():
    with hold_run(Path(sys.argv[1]), "rl"):
        try:
            print("checking", flush=True)
            time.sleep(60)
        finally:
            print("leaving", flush=True)
            time.sleep(0.5)

run_entrypoint("rl", check)
"""


def test_sigterm_before_the_start_leaves_no_lock(tmp_path: Path) -> None:
    root = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, str(root)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "checking\n"
    assert sorted(path.name for path in root.iterdir()) == ["orchestrator.lock", "trainer.lock"]
    process.terminate()
    assert process.stdout.readline() == "leaving\n"
    process.terminate()  # schedulers repeat it
    _, told = process.communicate(timeout=60)
    assert (process.returncode, told) == (128 + signal.SIGTERM, "rl: stopped by SIGTERM\n")
    assert not root.exists()


@pytest.mark.parametrize("variable", [SUPERVISOR_PID, "RANK"])
def test_what_others_have_started_ends_at_once(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "0")
    with cleaning_up_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    monkeypatch.delenv(variable)
    with cleaning_up_on_sigterm():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_training_that_diverges_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_entrypoint("sft", leaving(Diverged("the gradient norm is nan")))
    assert caught.value.code == 1
    assert capsys.readouterr().err == "sft: the gradient norm is nan\n"


def test_a_process_that_was_asked_to_end_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_entrypoint("sft", leaving(Stopped(signal.SIGTERM, "stopped by SIGTERM")))
    assert caught.value.code == 143
    assert capsys.readouterr().err == "sft: stopped by SIGTERM\n"


def test_a_process_by_pid(tmp_path: Path) -> None:
    script = "import time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", script])
    try:
        assert process_exists(process.pid) and process_state(process.pid) in ("R", "S", "D")
        started, own = start_time(process.pid), start_time(os.getpid())
        assert started is not None and own is not None and started > own
        process.kill()
        while process_state(process.pid) != "Z":
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
    assert process_state(process.pid) is None and start_time(process.pid) is None
    assert not process_exists(process.pid)


def test_a_process_whose_supervisor_is_gone_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUPERVISOR_PID, str(os.getppid() + 1))
    monkeypatch.setattr("ctypes.CDLL", lambda _name: type("Libc", (), {"prctl": staticmethod(lambda *_: 0)}))
    with pytest.raises(SystemExit, match="the supervisor is gone"):
        die_with_supervisor()


def test_cores_are_counted_where_nobody_says_which_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """macOS does not."""
    assert usable_cores() == len(os.sched_getaffinity(0))
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6


FAMILY = """
import os, signal, subprocess, sys
subprocess.Popen(["sleep", "1000"], env={})
reader, writer = os.pipe()
if os.fork() == 0:  # a daemon: its parent ends, and it has a session of its own
    os.setsid()
    if os.fork() == 0:
        os.write(writer, str(os.getpid()).encode())
        signal.pause()
    os._exit(0)
print(os.read(reader, 100).decode(), flush=True)
"""


@contextmanager
def family(then: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A kept process, and all that is below its keeper: itself, a child and a daemon."""
    command = kept([sys.executable, "-c", FAMILY + then])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            daemon = int(process.stdout.readline())
            pids = descendants(process.pid)
            assert daemon in pids and len(pids) >= 3
            yield process, pids
        finally:
            kill_tree(process)


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if process_exists(pid)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("then", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV), ("os._exit(0)", 0)],
)
def test_what_a_kept_process_started_ends_when_it_does(then: str, code: int) -> None:
    with family(f"sys.stdin.read(1); {then}") as (process, pids):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == code
        assert not any(map(process_exists, pids))


def test_a_kept_process_is_killed_with_all_that_it_started() -> None:
    with family("signal.pause()") as (process, pids):
        kill_tree(process)
        assert process.returncode == -signal.SIGKILL
        assert not any(map(process_exists, pids))


def test_a_keeper_that_is_stopped_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "SWEEP_S", -0.9)
    with family("signal.pause()") as (process, pids):
        process.send_signal(signal.SIGSTOP)
        kill_tree(process)
        wait_until_gone(pids)


def test_a_kept_process_gets_the_signals_of_its_keeper() -> None:
    then = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(5)); print('ready', flush=True); signal.pause()"
    with family(then) as (process, _):
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 5


def test_a_kept_process_ends_with_the_one_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    command = [sys.executable, "-c", f"{FAMILY}signal.pause()"]
    script.write_text(
        f"import subprocess\nfrom tandem.utils.processes import kept\nsubprocess.Popen(kept({command!r})).wait()\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        pids = descendants(parent.pid)
        parent.kill()
        parent.wait()
        assert len(pids) >= 4
        wait_until_gone(pids)


ENDING = """
import atexit, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from tandem.utils.processes import run_entrypoint, run_process

class Module:
    def __del__(self):
        print("taken apart")

module = Module()
pool = ThreadPoolExecutor(1)

def say_late():
    time.sleep(0.2)
    print("thread")

def body():
    atexit.register(print, "exit function")
    pool.submit(print, "pool").result()
    threading.Thread(target=say_late).start()
    {leave}

run_process(lambda: run_entrypoint("rl", body))
"""


@pytest.mark.parametrize(
    ("leave", "code", "error"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(0)", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(143)", 143, ""),
        ("raise SystemExit('in vain')", 1, "in vain\n"),
        ("from tandem.utils.errors import UserError; raise UserError('a mistake')", 2, "rl: a mistake\n"),
    ],
)
def test_a_process_leaves_with_its_code_when_all_is_written(leave: str, code: int, error: str) -> None:
    """Threads end, and exit functions are called; only the modules stay as they are."""
    done = subprocess.run([sys.executable, "-c", ENDING.format(leave=leave)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, error)
    ended = ["pool", "thread", "exit function"]
    assert done.stdout.splitlines() == (ended if error != "in vain\n" else [*ended, "taken apart"])


def test_an_output_that_cannot_be_written_is_told() -> None:
    script = "from tandem.utils.processes import run_process; run_process(lambda: print('x'))"
    with open("/dev/full", "w") as full:  # noqa: PTH123
        done = subprocess.run([sys.executable, "-c", script], stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0 and "No space left on device" in done.stderr


def test_a_program_that_runs_a_command_goes_on_after_it(tmp_path: Path) -> None:
    (tmp_path / "command.py").write_text(
        "from tandem.utils.processes import run_process\ndef main(): pass\nrun_process(main)\n"
    )
    script = "import runpy; runpy.run_module('command', run_name='__main__'); print('after')"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "after\n"), done.stderr
