"""How a process leaves."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.utils.errors import UserError
from tandem.utils.processes import (
    SUPERVISOR_PID,
    Stopped,
    die_with_supervisor,
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
    assert caught.value.code == 1
    assert capsys.readouterr().err == "trainer: [Errno 28] No space left on device: '/run/weights'\n"


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
