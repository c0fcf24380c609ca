"""Processes are started, watched and ended together; none is left."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.launch.supervisor import Interrupted, RunFailed, Supervisor, last_lines

SERVE = "import time; print('serving'); time.sleep(60)"
WORK = "print('working')"


def nothing() -> None:
    """A view that shows nothing."""


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(ready: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


def assert_all_ended(supervisor: Supervisor) -> None:
    assert all(process.returncode is not None for process in supervisor.processes.values())
    assert not any(is_running(process.pid) for process in supervisor.processes.values())


def test_the_run_ends_when_the_workers_have_finished_and_the_server_is_stopped(make_process) -> None:
    ticks: list[int] = []
    supervisor = Supervisor(
        [make_process("inference", SERVE), make_process("orchestrator", WORK), make_process("trainer", WORK)]
    )
    before = signal.getsignal(signal.SIGTERM)
    supervisor.run(lambda: ticks.append(1))
    assert_all_ended(supervisor)
    assert supervisor.processes["inference"].returncode == -signal.SIGTERM
    assert supervisor.plans["trainer"].log.read_text() == "working\n"
    assert ticks and signal.getsignal(signal.SIGTERM) is before


def test_both_workers_have_to_finish(make_process, tmp_path: Path) -> None:
    slow = "import sys, time, pathlib; time.sleep(0.5); pathlib.Path(sys.argv[1], 'trained').touch()"
    Supervisor([make_process("orchestrator", WORK), make_process("trainer", slow)]).run(nothing)
    assert (tmp_path / "trained").exists()


def test_children_see_the_plan_and_their_supervisor(make_process) -> None:
    script = "import os; print(os.environ['OF_THE_PLAN'], os.environ['TANDEM_SUPERVISOR_PID'])"
    plan = make_process("trainer", script)
    Supervisor([plan]).run(nothing)
    assert plan.log.read_text() == f"yes {os.getpid()}\n"


def test_a_failing_worker_is_named_with_its_last_lines_and_its_log(make_process) -> None:
    fail = "print('\\n'.join(f'line {n}' for n in range(40))); raise SystemExit(3)"
    plans = [make_process("inference", SERVE), make_process("orchestrator", SERVE), make_process("trainer", fail)]
    supervisor = Supervisor(plans)
    with pytest.raises(RunFailed) as caught:
        supervisor.run(nothing)
    message = str(caught.value)
    assert message.startswith(f"the trainer process ended with exit code 3. Its last lines ({plans[2].log}):\n")
    assert message.splitlines()[1:] == [f"  line {number}" for number in range(25, 40)]
    assert_all_ended(supervisor)


def test_a_killed_worker_is_named_with_the_signal(make_process) -> None:
    supervisor = Supervisor([make_process("orchestrator", SERVE), make_process("trainer", SERVE)])

    def kill_trainer() -> None:
        supervisor.processes["trainer"].kill()

    with pytest.raises(RunFailed, match=r"the trainer process ended with signal SIGKILL, .* memory ran out"):
        supervisor.run(kill_trainer)
    assert_all_ended(supervisor)


def test_a_server_that_ends_early_is_a_failure_even_with_exit_code_0(make_process) -> None:
    supervisor = Supervisor([make_process("inference", "print('bye')"), make_process("trainer", SERVE)])
    with pytest.raises(RunFailed, match="the inference process ended with exit code 0") as caught:
        supervisor.run(nothing)
    assert str(caught.value).endswith("\n  bye")
    assert_all_ended(supervisor)


def test_a_command_that_does_not_exist_leaves_nobody_behind(make_process) -> None:
    plan = make_process("trainer", "")
    plan.command[0] = "/no/such/python"
    supervisor = Supervisor([make_process("inference", SERVE), plan])
    with pytest.raises(FileNotFoundError, match="/no/such/python"):
        supervisor.run(nothing)
    assert_all_ended(supervisor)


STUBBORN = """\
import pathlib, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ignore = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", ignore])
pathlib.Path(sys.argv[1], "grandchild.tmp").write_text(str(child.pid))
pathlib.Path(sys.argv[1], "grandchild.tmp").rename(pathlib.Path(sys.argv[1], "grandchild"))
time.sleep(60)
"""
FAIL_AFTERWARDS = """\
import pathlib, sys, time
while not pathlib.Path(sys.argv[1], "grandchild").exists():
    time.sleep(0.01)
time.sleep(0.3)
raise SystemExit(1)
"""


def test_whoever_ignores_the_request_is_killed_with_its_children(make_process, tmp_path: Path) -> None:
    supervisor = Supervisor([make_process("inference", STUBBORN), make_process("trainer", FAIL_AFTERWARDS)])
    started = []
    with pytest.raises(RunFailed, match="the trainer process"):
        supervisor.run(lambda: started.append(time.monotonic()))
    assert 5 < time.monotonic() - started[-1] < 60
    assert supervisor.processes["inference"].returncode == -signal.SIGKILL
    assert_all_ended(supervisor)
    wait_until(lambda: not is_running(int((tmp_path / "grandchild").read_text())))


def test_children_that_a_process_leaves_behind_are_ended(make_process, tmp_path: Path) -> None:
    script = """\
import pathlib, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1], "left").write_text(str(child.pid))
"""
    Supervisor([make_process("trainer", script)]).run(nothing)
    wait_until(lambda: not is_running(int((tmp_path / "left").read_text())))


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """For processes that will not end however long they are given."""
    monkeypatch.setattr("tandem.launch.supervisor.GRACE_S", 0.5)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_everybody_and_is_told(make_process, number: signal.Signals) -> None:
    supervisor = Supervisor([make_process("inference", SERVE), make_process("trainer", SERVE)])
    sent: list[int] = []

    def send_once() -> None:
        if not sent:
            sent.append(number)
            os.kill(os.getpid(), number)

    with pytest.raises(Interrupted, match=number.name) as caught:
        supervisor.run(send_once)
    assert caught.value.signal_number == number
    assert_all_ended(supervisor)


SAVE = """\
import pathlib, signal, sys, time
def save(number, frame):
    time.sleep(float(sys.argv[2]) if len(sys.argv) > 2 else 0.3)
    pathlib.Path(sys.argv[1], "saved").touch()
    raise SystemExit(128 + number)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], "ready").touch()
while True:
    time.sleep(0.05)
"""


def signals_when_ready(folder: Path, *numbers: signal.Signals, apart_s: float = 0.0) -> threading.Thread:
    def send() -> None:
        wait_until((folder / "ready").exists, 60)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(apart_s)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_the_trainer_saves_before_a_signal_ends_the_run(make_process, tmp_path: Path) -> None:
    """Sent twice at once, as a scheduler and a parent may do, it is still one signal."""
    supervisor = Supervisor([make_process("orchestrator", SERVE), make_process("trainer", SAVE)], save_timeout_s=60)
    sending = signals_when_ready(tmp_path, signal.SIGTERM, signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"):
        supervisor.run(nothing)
    sending.join()
    assert (tmp_path / "saved").exists()
    assert supervisor.processes["trainer"].returncode == 143
    assert_all_ended(supervisor)


def test_a_second_signal_ends_the_run_at_once(make_process, tmp_path: Path, monkeypatch, short_grace: None) -> None:
    # Much less than the time between them: a busy machine may be late to hear of the first.
    monkeypatch.setattr("tandem.launch.supervisor.REPEATED_WITHIN_S", 0.05)
    slow = SAVE.replace("time.sleep(float", "time.sleep(600) or (float")
    supervisor = Supervisor([make_process("trainer", slow)], save_timeout_s=600)
    sending = signals_when_ready(tmp_path, signal.SIGINT, signal.SIGINT, apart_s=1.2)
    with pytest.raises(Interrupted, match="SIGINT"):
        supervisor.run(nothing)
    sending.join()
    assert not (tmp_path / "saved").exists()
    assert_all_ended(supervisor)


def test_signals_during_the_clean_up_do_not_stop_it(make_process, tmp_path: Path, monkeypatch) -> None:
    """Of somebody who keeps pressing Ctrl-C while processes are being ended: none counts as the second one."""
    monkeypatch.setattr("tandem.launch.supervisor.REPEATED_WITHIN_S", 0.0)
    supervisor = Supervisor([make_process("trainer", SERVE), make_process("inference", SERVE)])
    stop = supervisor.stop

    def interrupted_stop() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
        time.sleep(0.1)
        stop()

    monkeypatch.setattr(supervisor, "stop", interrupted_stop)
    with pytest.raises(RuntimeError, match="the view fails"):
        supervisor.run(fail)
    assert_all_ended(supervisor)


def fail() -> None:
    raise RuntimeError("the view fails")


def test_a_save_that_takes_too_long_is_given_up(make_process, tmp_path: Path, caplog, short_grace: None) -> None:
    slow = SAVE.replace("time.sleep(float", "time.sleep(600) or (float")
    supervisor = Supervisor([make_process("trainer", slow)], save_timeout_s=0.5)
    sending = signals_when_ready(tmp_path, signal.SIGTERM)
    with pytest.raises(Interrupted):
        supervisor.run(nothing)
    sending.join()
    assert "the trainer did not save a checkpoint in time" in caplog.text
    assert_all_ended(supervisor)


def test_a_signal_to_the_whole_job_is_no_failure_of_who_ends_first(make_process, monkeypatch) -> None:
    """The server ends at once; the supervisor hears of the signal a moment later."""
    monkeypatch.setattr("tandem.launch.supervisor.POLL_S", 0.5)  # a moment is four of them
    server = make_process("inference", SERVE.replace("time.sleep(60)", "time.sleep(0.3); raise SystemExit(143)"))
    supervisor = Supervisor([server, make_process("trainer", SAVE)], save_timeout_s=60)

    def scheduler() -> None:
        wait_until(lambda: bool(supervisor.processes) and supervisor.processes["inference"].poll() is not None, 60)
        os.kill(os.getpid(), signal.SIGTERM)

    sending = threading.Thread(target=scheduler)
    sending.start()
    with pytest.raises(Interrupted, match="SIGTERM"):
        supervisor.run(nothing)
    sending.join()


def test_the_last_words_of_a_process_are_bounded(make_process) -> None:
    supervisor = Supervisor([make_process("trainer", "print('x' * 200_000); raise SystemExit(1)")])
    with pytest.raises(RunFailed) as caught:
        supervisor.run(nothing)
    assert len(str(caught.value)) < 4000 and "characters left out]" in str(caught.value)


def test_a_view_that_fails_leaves_nobody_behind(make_process) -> None:
    supervisor = Supervisor([make_process("trainer", SERVE)])

    def fail() -> None:
        raise OSError("the terminal is gone")

    with pytest.raises(OSError, match="the terminal is gone"):
        supervisor.run(fail)
    assert_all_ended(supervisor)


def test_last_lines_of_no_log_and_of_an_empty_one(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none") == "  (nothing was logged)"
    (tmp_path / "empty").touch()
    assert last_lines(tmp_path / "empty") == "  (nothing was logged)"


def test_the_server_is_given_the_socket_and_nobody_else(make_process, tmp_path: Path) -> None:
    """Started with it, it need not bind: the port was never free in between."""
    serve = (
        "import time; from tandem.utils.ports import inherited_socket; taken = inherited_socket()\n"
        f"open({str(tmp_path / 'port')!r}, 'w').write(str(taken.getsockname()[1])); time.sleep(60)"
    )
    work = (
        "import os, pathlib, time; assert 'TANDEM_LISTENING_FD' not in os.environ\n"
        f"while not pathlib.Path({str(tmp_path / 'port')!r}).exists(): time.sleep(0.05)"
    )
    with socket.create_server(("127.0.0.1", 0)) as listening:
        plans = [make_process("inference", serve), make_process("orchestrator", work), make_process("trainer", work)]
        Supervisor(plans, {"inference": listening}).run(nothing)
        assert (tmp_path / "port").read_text() == str(listening.getsockname()[1])
