"""What a user sees while a run goes on."""

import io
import re
from pathlib import Path

import pytest

from tandem.launch.progress import LiveDisplay, LogLines, make_view, plot, resample, sparkline
from tandem.utils.console import Console
from tandem.utils.files import Follower
from tandem.utils.metrics import RunLog
from tandem.utils.run_dir import RunDir


def make_console(*, terminal: bool = False, width: int = 200) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)


def shown(console: Console) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", console.file.getvalue())  # pyright: ignore[reportAttributeAccessIssue]


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def test_a_follower_gives_each_whole_line_once(tmp_path: Path) -> None:
    path = tmp_path / "log"
    follower = Follower(path)
    assert list(follower.lines()) == []
    append(path, "one\ntw")
    assert list(follower.lines()) == ["one"]
    assert list(follower.lines()) == []
    append(path, "o\nthree\n")
    assert list(follower.lines()) == ["two", "three"]


def test_a_line_that_does_not_end_is_read_once_and_kept_in_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.utils.files.MAX_LINE_BYTES", 1000)
    path, follower = tmp_path / "log", Follower(tmp_path / "log")
    for _ in range(5):
        append(path, "x" * 1500)
        assert list(follower.lines()) == []
        path.write_text("?" * path.stat().st_size)  # what was read is not looked at again
    assert len(follower._unfinished) == 1000
    append(path, "end\nshort\n")
    assert list(follower.lines()) == ["x" * 1000, "short"]


def test_a_follower_may_begin_at_the_end(tmp_path: Path) -> None:
    append(tmp_path / "log", "of an earlier run\n")
    follower = Follower(tmp_path / "log", from_end=True)
    append(tmp_path / "log", "new\n")
    assert list(follower.lines()) == ["new"]


def test_a_follower_of_a_file_that_was_cut_goes_on_from_its_end(tmp_path: Path) -> None:
    """As metrics.jsonl is when a run goes back to a checkpoint."""
    path = tmp_path / "log"
    path.write_text("one\ntwo\nthree\n")
    follower = Follower(path)
    assert len(list(follower.lines())) == 3
    path.write_text("one\n")
    assert list(follower.lines()) == []
    path.write_text("one\nagain\n")
    assert list(follower.lines()) == ["again"]


def test_a_follower_survives_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff\xfe ok\n")
    assert list(Follower(tmp_path / "log").lines()) == ["\ufffd\ufffd ok"]


def test_log_lines_carry_the_name_of_their_process(make_process) -> None:
    console, plans = make_console(), [make_process("inference", ""), make_process("trainer", "")]
    append(plans[0].log, "of an earlier run\n")
    view = LogLines(console, plans)
    append(plans[0].log, "ready [bold]\n")
    append(plans[1].log, "step 1\nste")
    view.tick()
    append(plans[1].log, "p 2\n")
    view.close()
    assert shown(console).splitlines() == [
        "   inference │ ready [bold]",
        "     trainer │ step 1",
        "     trainer │ step 2",
    ]


def test_what_processes_print_cannot_move_the_cursor(make_process, tmp_path: Path) -> None:
    """A reward function may print anything, and its errors may say anything."""
    for view_type in ("lines", "live"):
        console, plans = make_console(terminal=True), [make_process(f"orchestrator_{view_type}", "")]
        view = make_view(console, view_type, plans, RunDir(tmp_path), 0, 1)
        append(plans[0].log, "12:00:00 WARNING \x1b[2J\x1b]0;mine\x07\n")
        view.close()
        assert r"\x1b[2J\x1b]0;mine" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_the_live_display_shows_findings_while_they_hold(make_process, tmp_path: Path) -> None:
    console, run_dir = make_console(terminal=True), RunDir(tmp_path)
    log_without_signal(run_dir, 1, 2)  # before it was resumed
    view = LiveDisplay(console, [], run_dir, start_step=2, max_steps=9)
    log_without_signal(run_dir, 3, 3)
    view.close()
    text = shown(console)
    assert "nothing is learned: every reward is 0. Read samples/" in " ".join(text[text.rindex("step 3/9") :].split())


def log_without_signal(run_dir: RunDir, first: int, last: int) -> None:
    metrics = {"groups/without_signal": 1, "reward/mean": 0, "reward/min": 0, "reward/max": 0}
    for step in range(first, last + 1):
        RunLog(run_dir, "orchestrator").metrics(step, metrics)
        RunLog(run_dir, "trainer").metrics(step, {"grad_norm": 0.0})


def test_the_live_display_shows_where_the_run_is(make_process, tmp_path: Path) -> None:
    console = make_console(terminal=True)
    run_dir = RunDir(tmp_path)
    plans = [make_process("orchestrator", "")]
    view = LiveDisplay(console, plans, run_dir, start_step=0, max_steps=10)
    view.tick()
    assert "starting …" in shown(console)
    orchestrator, trainer = RunLog(run_dir, "orchestrator"), RunLog(run_dir, "trainer")
    orchestrator.metrics(0, {"eval/reward": 0.125})
    view._next_draw = 0.0
    view.tick()
    assert "first batch …" in shown(console)
    for step in (1, 2, 3):
        orchestrator.metrics(step, {"reward/mean": step / 4, "staleness/max": 1, "tokens_per_s": 12345.6})
        trainer.metrics(step, {"loss": 0.5})
    append(plans[0].log, "12:00:00 INFO    step 3\n12:00:00 WARNING group 7 failed\n")
    view.close()
    text = shown(console)
    last = text[text.rindex("step 3/10") :]
    for part in ("step 3/10", "reward 0.750", "held out 0.125 at 0", "staleness 1", "tokens/s 12,346", "left 0:0"):
        assert part in last
    assert "▁" in last and "█" in last
    assert "orchestrator │ 12:00:00 WARNING group 7 failed" in text
    assert "INFO" not in text


@pytest.mark.parametrize("width", [80, 40])
def test_a_number_of_the_live_display_is_never_torn(tmp_path: Path, width: int) -> None:
    console, run_dir = make_console(terminal=True, width=width), RunDir(tmp_path)
    view = LiveDisplay(console, [], run_dir, start_step=0, max_steps=1000)
    orchestrator, trainer = RunLog(run_dir, "orchestrator"), RunLog(run_dir, "trainer")
    orchestrator.metrics(100, {"eval/reward": 0.125})
    for step in range(100, 200):
        orchestrator.metrics(step, {"reward/mean": 0.75, "staleness/max": 1, "tokens_per_s": 12345.6})
        trainer.metrics(step, {"loss": 0.5})
    view.close()
    text = shown(console)
    last = text[text.rindex("step 199/1000") :]
    for part in ("reward 0.750", "held out 0.125 at 100", "staleness 1", "tokens/s 12,346", "left "):
        assert part in last
    assert max(map(len, last.splitlines())) <= width


@pytest.mark.parametrize("show", ["lines", "live"])
def test_a_log_line_is_wrapped_below_its_text_and_whole_where_it_is_piped(make_process, tmp_path: Path, show) -> None:
    line = "12:00:00 WARNING group 7 failed, and what was to be said of it does not fit one line of a terminal"
    for terminal in (True, False):
        console, plans = make_console(terminal=terminal, width=80), [make_process(f"trainer_{terminal}", "")]
        view = make_view(console, show, plans, RunDir(tmp_path), 0, 1)
        append(plans[0].log, f"{line}\n")
        view.close()
        lines = shown(console).splitlines()
        first = next(number for number, text in enumerate(lines) if "│" in text)
        if terminal:
            assert max(map(len, lines)) <= 80 and lines[first + 1].startswith(" " * 15)
            assert lines[first + 1].strip() == "does not fit one line of a terminal"
        else:
            assert lines[first].endswith(line)


def test_the_time_left_needs_two_steps(make_process, tmp_path: Path, monkeypatch) -> None:
    """First step at 100 s, the third at 120 s: 10 s a step, and of ten steps seven are left."""
    now = [100.0]
    monkeypatch.setattr("tandem.launch.progress.time.monotonic", lambda: now[0])
    view = LiveDisplay(make_console(), [], RunDir(tmp_path), start_step=0, max_steps=10)
    trainer = RunLog(RunDir(tmp_path), "trainer")
    trainer.metrics(1, {"loss": 0.5})
    view.tick()
    assert view._time_left() == "–"
    now[0] = 120.0
    trainer.metrics(2, {"loss": 0.5})
    trainer.metrics(3, {"loss": 0.5})
    view.tick()
    assert view._time_left() == "1:10"
    view.close()


def test_the_view_follows_the_option_and_the_terminal(make_process, tmp_path: Path) -> None:
    def view_of(show: str, *, terminal: bool) -> type:
        view = make_view(make_console(terminal=terminal), show, [], RunDir(tmp_path), 0, 1)
        view.close()
        return type(view)

    assert view_of("auto", terminal=True) is LiveDisplay
    assert view_of("auto", terminal=False) is LogLines
    assert view_of("live", terminal=False) is LiveDisplay
    assert view_of("lines", terminal=True) is LogLines


def test_a_damaged_line_is_passed_over(tmp_path: Path) -> None:
    console, metrics = make_console(terminal=True), RunDir(tmp_path).metrics
    view = LiveDisplay(console, [], RunDir(tmp_path), 0, 10)
    append(metrics, '\n{"process": "orchestrator", "st\n[]\n{"process": "orchestrator", "step": 1}\n')
    RunLog(RunDir(tmp_path), "orchestrator").metrics(2, {"reward/mean": 0.75})
    RunLog(RunDir(tmp_path), "trainer").metrics(2, {"loss": 0.1})
    view.close()
    assert "step 2/10" in shown(console) and "reward 0.750" in shown(console)


def test_sparkline() -> None:
    """From least to greatest in eight bars: 0 is the lowest, 7 the highest, each step one more."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 0.0, 0.3], width=10) == "█▁▃"  # 0.3 of seven steps: two
    assert sparkline([0.3, 0.3], width=4) == "▁▁"
    assert sparkline([], width=4) == ""


def test_sparkline_of_more_values_than_columns() -> None:
    """Means of pairs: 0, 7, 7."""
    assert sparkline([0, 0, 7, 7, 6, 8], width=3) == "▁██"


def test_resample() -> None:
    assert resample([1, 2, 3], 5) == [1, 2, 3]
    assert resample([1, 2, 3, 4], 2) == [1.5, 3.5]
    assert resample([1, 2, 3, 4, 5], 2) == [1.5, 4.0]
    assert resample([], 3) == []


@pytest.mark.parametrize("width", [1, 7, 60])
def test_resample_keeps_the_width_and_the_mean_of_a_constant(width: int) -> None:
    assert resample([0.25] * 100, width) == [0.25] * width


def test_plot() -> None:
    """Two rows: 0 leaves both empty, 1/2 fills the lower one, 1 fills both."""
    assert plot([0.0, 0.5, 1.0], width=10, height=2) == ["  1.00 ┤  █", "  0.00 ┤ ██"]
    assert plot([0.0, 0.25, 1.0], width=10, height=2) == ["  1.00 ┤  █", "  0.00 ┤ ▄█"]


def test_plot_of_a_constant_and_of_nothing() -> None:
    assert plot([0.5, 0.5], width=4, height=3) == ["  0.50 ┤  ", "       ┤  ", "  0.50 ┤  "]
    assert plot([], width=4, height=3) == []
