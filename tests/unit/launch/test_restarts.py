"""Who is started again, how often, and from where."""

import signal
import time
from pathlib import Path

import pytest

from tandem.launch.restarts import MOST_DELAY_S, Restarts
from tandem.launch.supervisor import Interrupted, RunFailed, Supervisor
from tandem.utils.errors import BrokenRunDirectory
from tandem.utils.files import read_json_lines
from tandem.utils.manifest import write_manifest
from tandem.utils.metrics import GAVE_UP, RunLog
from tandem.utils.processes import REFUSED, UNUSABLE
from tandem.utils.run_dir import RunDir, step_name

SERVE = "import time; time.sleep(600)"
# Fails at its first start, works at its second.
FAIL_ONCE = """\
import pathlib, sys
mark = pathlib.Path(sys.argv[1], "failed")
if not mark.exists():
    mark.touch()
    print("out of memory\\n")
    raise SystemExit(7)
pathlib.Path(sys.argv[1], "resumed").write_text(" ".join(sys.argv[2:]))
"""
# Works until it is asked to end, or for good once the run was resumed.
FOLLOW = """\
import pathlib, signal, sys, time
def save(number, frame):
    pathlib.Path(sys.argv[1], "saved").touch()
    raise SystemExit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], "following").touch()
while "--resume" not in sys.argv:
    time.sleep(0.02)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path)


def begun(run_dir: RunDir, max_restarts: int = 3, delay_s: float = 0.0) -> Restarts:
    """Of a run that has made a step."""
    restarts = Restarts(run_dir, max_restarts, delay_s)
    RunLog(run_dir, "trainer").metrics(1, {"loss": 0.0})
    return restarts


def save_checkpoint(run_dir: RunDir, step: int) -> None:
    folder = run_dir.checkpoints / step_name(step)
    folder.mkdir(parents=True)
    write_manifest(folder, step)


def nothing() -> None:
    """A view that shows nothing."""


def test_delays_double_and_restarts_are_counted_by_process(run_dir: RunDir) -> None:
    restarts = begun(run_dir, max_restarts=3, delay_s=2.0)
    assert [restarts.next_delay_s("trainer", -9) for _ in range(4)] == [2.0, 4.0, 8.0, None]
    assert restarts.next_delay_s("inference", 1) == 2.0
    assert begun(run_dir, max_restarts=9, delay_s=50.0).next_delay_s("trainer", 1) == 50.0
    long = begun(run_dir, max_restarts=9, delay_s=50.0)
    assert [long.next_delay_s("trainer", 1) for _ in range(2)] == [50.0, MOST_DELAY_S]


def test_what_fails_before_the_first_step_is_a_mistake(run_dir: RunDir) -> None:
    RunLog(run_dir, "trainer").metrics(3, {"loss": 0.0})  # of an earlier start
    restarts = Restarts(run_dir, 3, 0.0)
    assert restarts.next_delay_s("trainer", -9) is None
    RunLog(run_dir, "trainer").metrics(4, {"loss": 0.0})
    assert restarts.next_delay_s("trainer", -9) == 0.0
    run_dir.metrics.unlink()  # it went back to a checkpoint
    assert restarts.next_delay_s("trainer", -9) == 0.0


def test_what_only_a_user_can_mend_is_not_tried_again(run_dir: RunDir) -> None:
    restarts = begun(run_dir)
    assert restarts.next_delay_s("trainer", REFUSED) is None
    assert restarts.next_delay_s("trainer", UNUSABLE) is None
    RunLog(run_dir, "orchestrator").event(GAVE_UP, why="another run has the server")
    assert restarts.next_delay_s("orchestrator", 1) is None
    assert restarts.next_delay_s("inference", 1) is not None


# As a trainer whose files the disk does not take; the orchestrator would go on.
FULL = """\
import resource
from pathlib import Path
from tandem.utils.files import write_atomic
from tandem.utils.log import write_what_the_terminal_can
from tandem.utils.processes import run_entrypoint

def train():
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
    write_atomic(Path("FILE"), b"x" * 1000)

write_what_the_terminal_can()  # the log does not take much either
run_entrypoint("trainer", train)
"""


def test_a_disk_that_is_full_is_not_tried_again(make_process, run_dir: RunDir, tmp_path: Path) -> None:
    full = FULL.replace("FILE", str(tmp_path / "file"))
    plans = [make_process("orchestrator", SERVE), make_process("trainer", full)]
    with pytest.raises(RunFailed, match="trainer process ended with exit code 3") as caught:
        Supervisor(plans, restarts=begun(run_dir)).run(nothing)
    assert "trainer: [Errno 27] File too large: " in str(caught.value)
    (event,) = read_json_lines(run_dir.events)
    assert event["event"] == "failed" and "File too large" in event["why"]


def test_a_run_whose_directory_is_gone_ends_with_one_line(make_process, tmp_path: Path) -> None:
    """And nothing of it is made again."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.root.mkdir()
    run_dir.create()
    rename = f"import os; os.rename('{run_dir.root}', '{tmp_path / 'moved'}'); raise SystemExit(1)"
    plans = [make_process("orchestrator", SERVE), make_process("trainer", rename)]
    with pytest.raises(BrokenRunDirectory, match=r"run' was renamed or deleted under the run, which ends; .* --resume"):
        Supervisor(plans, restarts=begun(run_dir)).run(nothing)
    assert not run_dir.root.exists()


def test_a_clock_that_is_set_back_changes_nothing(run_dir: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does that of a node which is behind: the lines of this start are told from those before by their number."""
    RunLog(run_dir, "orchestrator").event(GAVE_UP, why="of an earlier start")
    restarts = Restarts(run_dir, 3, 0.0)
    an_hour_ago = time.time() - 3600
    monkeypatch.setattr("tandem.utils.metrics.time.time", lambda: an_hour_ago)
    RunLog(run_dir, "trainer").metrics(1, {"loss": 0.0})
    assert restarts.next_delay_s("orchestrator", -9) == 0.0
    RunLog(run_dir, "orchestrator").event(GAVE_UP, why="another run has the server")
    assert restarts.next_delay_s("orchestrator", 1) is None


def test_a_server_is_started_again_by_itself(make_process, run_dir: RunDir, tmp_path: Path) -> None:
    work = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1], 'resumed').exists(): time.sleep(0.02)"
    plans = [make_process("inference", FAIL_ONCE + SERVE), make_process("trainer", work)]
    Supervisor(plans, restarts=begun(run_dir)).run(nothing)
    (event,) = read_json_lines(run_dir.events)
    assert (event["event"], event["who"], event["why"], event["restart"]) == (
        *("restarted", "inference", "exit code 7: out of memory", 1),
    )
    assert "step" not in event and (tmp_path / "resumed").read_text() == ""


@pytest.mark.parametrize("step", [0, 4])
def test_a_failed_orchestrator_lets_the_trainer_save_and_both_go_on(
    make_process, run_dir: RunDir, tmp_path: Path, step: int
) -> None:
    wait = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1], 'following').exists(): time.sleep(0.02)\n"
    until = "while not pathlib.Path(sys.argv[1], 'resumed').exists()"
    follow = FOLLOW if step else FOLLOW.replace('while "--resume" not in sys.argv', until)
    plans = [make_process("orchestrator", wait + FAIL_ONCE), make_process("trainer", follow)]
    restarts = begun(run_dir)
    for number in range(1, step + 3):
        RunLog(run_dir, "trainer").metrics(number, {"loss": 0.0})
    if step:
        save_checkpoint(run_dir, step)
    Supervisor(plans, save_timeout_s=60, restarts=restarts).run(nothing)
    assert (tmp_path / "saved").exists()
    assert (tmp_path / "resumed").read_text() == ("--resume" if step else "")
    (event,) = [event for event in read_json_lines(run_dir.events) if event["event"] == "restarted"]
    assert event["who"] == "orchestrator" and event["step"] == step
    assert max((line["step"] for line in read_json_lines(run_dir.metrics)), default=0) == step  # it went back


def test_after_too_many_restarts_the_run_has_failed(make_process, run_dir: RunDir) -> None:
    plans = [make_process("orchestrator", SERVE), make_process("trainer", "raise SystemExit(5)")]
    with pytest.raises(RunFailed, match="the trainer process ended with exit code 5"):
        Supervisor(plans, restarts=begun(run_dir, max_restarts=2)).run(nothing)
    events = [(event["event"], event["who"]) for event in read_json_lines(run_dir.events)]
    assert events == [("restarted", "trainer"), ("restarted", "trainer"), ("failed", "trainer")]


def test_a_run_can_be_ended_while_it_waits_to_restart(make_process, run_dir: RunDir) -> None:
    plans = [make_process("orchestrator", SERVE), make_process("trainer", "raise SystemExit(5)")]
    asked: list[float] = []
    restarts = begun(run_dir, delay_s=600)
    supervisor = Supervisor(plans, restarts=restarts, is_stop_wanted=lambda: bool(asked))
    with pytest.raises(Interrupted, match="`rl --stop`") as caught:
        supervisor.run(lambda: asked.append(1) if supervisor.processes["trainer"].poll() is not None else None)
    assert caught.value.signal_number == signal.SIGTERM
    assert all(process.poll() is not None for process in supervisor.processes.values())
