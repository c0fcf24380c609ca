"""How far a run is: by what its processes said last, by the queue, and by who holds its lock."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.launch.sweep.folder import Run, store_jobs
from tandem.launch.sweep.states import Progress, progress_of
from tandem.utils.files import append_json_line, write_json
from tandem.utils.run_holder import Holder
from tandem.utils.run_lock import RunLock

STEPS = 3


def make_run(folder: Path, command: str = "rl", *, evaluates: bool = False, begun: bool = True) -> Run:
    run = Run("one", "grpo", command, str(folder / "one"), {}, 1, evaluates)
    if begun:
        (run.directory / "config").mkdir(parents=True)
        write_json(run.directory / "config" / f"{command}.json", {"max_steps": STEPS})
    return run


def say(run: Run, *events: str) -> None:
    """Each "orchestrator finished 3"."""
    for process, event, step in (text.split() for text in events):
        line = {"process": process, "event": event, "step": int(step)}
        append_json_line(run.directory / "events.jsonl", line)


def look(folder: Path, run: Run, queue: Any = (), jobs: Any = (), monkeypatch: Any = None) -> Progress:
    """`jobs` by kind, and what the queue says of them."""
    for kind, job in dict(jobs).items():
        store_jobs(folder, kind, {run.name: job})
    if jobs:
        monkeypatch.setattr("tandem.launch.sweep.states.jobs_under_way", lambda: dict(queue))
    (found,) = progress_of(folder, [run])
    return found


@pytest.mark.parametrize(
    ("events", "state"),
    [
        (["orchestrator finished 3", "trainer finished 3"], "finished"),
        (["orchestrator finished 3"], "failed"),  # the trainer's weights are not whole yet
        (["trainer finished 3", "orchestrator started 0"], "failed"),
        (["orchestrator finished 2", "trainer finished 2"], "failed"),  # of a shorter run, which is gone on with
        (["orchestrator finished 3", "trainer finished 3", "trainer started 2"], "failed"),
        (["orchestrator stopped 2", "trainer stopped 2"], "stopped"),
        (["orchestrator started 0", "trainer stopped 2"], "stopped"),
        (["orchestrator stopped 2", "trainer stopped 2", "orchestrator started 2", "trainer started 2"], "failed"),
        ([], "failed"),
    ],
)
def test_a_run_is_as_far_as_all_of_its_processes(tmp_path: Path, events: Sequence[str], state: str) -> None:
    run = make_run(tmp_path)
    say(run, *events)
    assert look(tmp_path, run).state == state


def test_a_run_that_has_not_begun_is_written_and_one_without_a_length_is_not_finished(tmp_path: Path) -> None:
    run = make_run(tmp_path, begun=False)
    assert look(tmp_path, run) == Progress(run, "written", 0, None, {})
    run.directory.mkdir(parents=True)
    say(run, "orchestrator finished 3", "trainer finished 3")
    assert look(tmp_path, run).state == "failed"


def lock(run: Run, **changes: Any) -> Path:
    path = run.directory / "trainer.lock"
    path.write_bytes(replace(Holder.this_process("rl"), **changes).encode(1))
    return path


@pytest.mark.parametrize("event", ["started", "stopped"])
def test_a_run_whose_lock_is_held_is_running(tmp_path: Path, event: str) -> None:
    run = make_run(tmp_path)
    say(run, f"orchestrator {event} 2", f"trainer {event} 2")
    held = RunLock(lock(run), Holder.this_process("rl"))
    assert look(tmp_path, run).state == "running"
    held.release()
    assert look(tmp_path, run).state == {"started": "failed", "stopped": "stopped"}[event]


def test_a_lock_whose_process_is_gone_is_nobodys(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    lock(run, process_started=1)
    assert look(tmp_path, run).state == "failed"


def test_a_lock_of_another_machine_is_believed_unless_a_job_took_it_which_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    lock(run, machine="another boot")
    assert look(tmp_path, run).state == "running"
    assert look(tmp_path, run, jobs={"run": "7"}, monkeypatch=monkeypatch).state == "failed"


@pytest.mark.parametrize(
    ("queue", "state"),
    [({"7": "pending"}, "pending"), ({"7": "running"}, "running"), ({"8": "running"}, "stopped")],
)
def test_a_job_in_the_queue_comes_before_what_a_run_said_when_it_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: dict[str, str], state: str
) -> None:
    run = make_run(tmp_path)
    say(run, "orchestrator stopped 2", "trainer stopped 2")
    found = look(tmp_path, run, queue, {"run": "7"}, monkeypatch)
    assert (found.state, found.job) == (state, "7")


@pytest.mark.parametrize("command", ["sft", "rl"])
def test_a_finished_run_is_finished_though_its_job_ends_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The job goes on with what comes after: results.csv."""
    run = make_run(tmp_path, command)
    say(run, *(f"{process} finished 3" for process in ("sft", "orchestrator", "trainer")))
    assert look(tmp_path, run, {"7": "running"}, {"run": "7"}, monkeypatch).state == "finished"


@pytest.mark.parametrize(
    ("queue", "job", "begun", "state"),
    [
        ({}, "", False, "written"),
        ({"9": "pending"}, "9", False, "pending"),
        ({"9": "running"}, "9", True, "running"),
        ({}, "9", False, "failed"),  # it has left the queue without results
        ({}, "", True, "failed"),  # of --local
    ],
)
def test_an_evaluation_begins_when_its_run_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, queue: dict[str, str], job: str, begun: bool, state: str
) -> None:
    run = make_run(tmp_path, "sft", evaluates=True)
    if begun:
        run.results.parent.mkdir()
    jobs = {"evaluation": job, "run": "7"} if job else {}
    assert look(tmp_path, run, queue, jobs, monkeypatch).evaluation is None, "its run has failed"
    say(run, "sft finished 3")
    assert look(tmp_path, run, queue, jobs, monkeypatch).evaluation == state
    write_json(run.results, {"results": [{"scores": {"reward": reward}} for reward in (0.25, 0.75, 0.5)]})
    found = look(tmp_path, run, queue, jobs, monkeypatch)
    assert (found.evaluation, found.metrics) == ("finished", {"evaluation/reward": 0.5})
    assert look(tmp_path, replace(run, evaluates=False), queue, jobs, monkeypatch).evaluation is None


def test_the_last_value_of_each_metric_is_shown_the_most_telling_first(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for line in ({"step": 1, "reward/mean": 0.1}, {"step": 2, "eval/reward": 0.2, "loss": 9}, {"step": 2}):
        append_json_line(run.directory / "metrics.jsonl", {"process": "orchestrator", "reward/mean": 0.3} | line)
    found = look(tmp_path, run)
    assert (found.step, found.max_steps) == (2, STEPS)
    assert list(found.metrics.items()) == [("eval/reward", 0.2), ("reward/mean", 0.3)]


def test_a_run_whose_files_are_damaged_has_no_step_and_no_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)

    def fail(_: object) -> Any:
        raise OSError(5, "Input/output error", f"{run.directory}/metrics.jsonl")

    with monkeypatch.context() as patched:
        patched.setattr("tandem.launch.sweep.states.read_metrics", fail)
        assert look(tmp_path, run) == Progress(run, "damaged", 0, STEPS, {}, damage="metrics.jsonl: Input/output error")
    (run.directory / "metrics.jsonl").mkdir()
    told = "metrics.jsonl is a folder, and a run has a file there; move it away"
    assert look(tmp_path, run) == Progress(run, "damaged", 0, None, {}, damage=told)


@pytest.mark.parametrize("content", [{}, [], {"max_steps": None}, {"max_steps": "many"}, {"max_steps": 1e400}])
def test_a_damaged_length_is_none(tmp_path: Path, content: Any) -> None:
    run = make_run(tmp_path)
    write_json(run.directory / "config" / "rl.json", content)
    assert look(tmp_path, run).max_steps is None


@pytest.mark.parametrize("evaluates", [True, False])
def test_an_evaluation_without_results_is_not_damaged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, evaluates: bool
) -> None:
    run = make_run(tmp_path, evaluates=evaluates)
    if not evaluates:
        write_json(run.results, {"results": [{"scores": {"reward": 0.5}}]})
    assert look(tmp_path, run).metrics == {} and caplog.text == ""
