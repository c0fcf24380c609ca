"""How a process leaves."""

import os

import pytest

from tandem.utils.errors import UserError
from tandem.utils.processes import SUPERVISOR_PID, die_with_supervisor, run_entrypoint


def leaving(error: BaseException):
    def body() -> None:
        raise error

    return body


def test_a_users_mistake_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run_entrypoint("rl", leaving(UserError("seq_len = 3 is too short")))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "rl: seq_len = 3 is too short\n"


def test_ctrl_c_is_exit_code_130_and_other_errors_are_shown_whole() -> None:
    with pytest.raises(SystemExit) as caught:
        run_entrypoint("rl", leaving(KeyboardInterrupt()))
    assert caught.value.code == 130
    with pytest.raises(RuntimeError, match="a bug"):
        run_entrypoint("rl", leaving(RuntimeError("a bug")))


def test_a_process_whose_supervisor_is_gone_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SUPERVISOR_PID, str(os.getppid() + 1))
    monkeypatch.setattr("ctypes.CDLL", lambda _name: type("Libc", (), {"prctl": staticmethod(lambda *_: 0)}))
    with pytest.raises(SystemExit, match="the supervisor is gone"):
        die_with_supervisor()
