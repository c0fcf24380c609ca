"""Runs on this machine: a few at a time, each with its evaluation, and all of them told when the sweep is."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tandem.launch.sweep import local
from tandem.launch.sweep.folder import Run
from tandem.launch.sweep.local import run_here
from tandem.utils.errors import UserError
from tandem.utils.processes import Stopped


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "POLL_S", 0.01)


def make_run(sweep: Path, name: str, script: str, evaluation: str | None = None, *, nodes: int = 1) -> Run:
    run = Run(name, "sft", "sft", str(sweep / name), {}, nodes, evaluation is not None)
    run.script.parent.mkdir()
    run.script.write_text(script)
    if evaluation is not None:
        run.evaluation_script.write_text(evaluation)
    return run


@pytest.mark.parametrize("max_jobs", [1, 2])
def test_so_many_run_at_a_time_in_their_order(tmp_path: Path, max_jobs: int) -> None:
    """Each waits for `max_jobs` to run at once, and says how many there are."""
    script = f"""
        cd {tmp_path}; touch $0.runs; echo $0 >> order
        for i in $(seq 50); do [ $(ls */*.runs | wc -l) -ge {max_jobs} ] && break; sleep 0.01; done
        sleep 0.02; ls */*.runs | wc -l >> at_once; sleep 0.02; rm $0.runs"""
    runs = [make_run(tmp_path, name, script) for name in "abcd"]
    assert run_here(tmp_path, runs, resume=False, max_jobs=max_jobs)
    assert max(map(int, (tmp_path / "at_once").read_text().split())) == max_jobs
    order = [Path(line).parent.name for line in (tmp_path / "order").read_text().splitlines()]
    assert [sorted(order[at : at + max_jobs]) for at in range(0, 4, max_jobs)] == [
        list("abcd"[at : at + max_jobs]) for at in range(0, 4, max_jobs)
    ]


def test_one_that_fails_is_not_evaluated_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [make_run(tmp_path, "a", "echo it fails; exit 3", f"touch {tmp_path}/evaluated")]
    runs += [make_run(tmp_path, "b", "true", f"kill -0 -- -$$ && cat > {tmp_path}/b/input")]
    assert not run_here(tmp_path, runs, resume=False, max_jobs=1)
    assert not (tmp_path / "evaluated").exists()
    assert (tmp_path / "b" / "input").read_text() == "", "evaluated in a session of its own, with no input"
    assert (tmp_path / "a" / "local.out").read_text() == "it fails\n"
    assert capsys.readouterr().out.splitlines() == [
        f"a: started, prints to {tmp_path}/a/local.out",
        "a: failed with exit code 3",
        f"b: started, prints to {tmp_path}/b/local.out",
        "b: finished",
    ]


def test_a_run_of_several_nodes_is_refused_before_any_is_started(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, "a", f"touch {tmp_path}/ran"), make_run(tmp_path, "b", "", nodes=2)]
    with pytest.raises(UserError, match=r"run 'b' is for 2 nodes, and --local has one; set slurm\.nodes: 1"):
        run_here(tmp_path, runs, resume=False, max_jobs=2)
    assert not (tmp_path / "ran").exists()


def test_a_sweep_that_is_stopped_waits_until_its_runs_have_saved(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    script = f"""
        trap 'sleep 0.1; touch {tmp_path}/saved; exit' TERM
        touch {tmp_path}/began; for i in $(seq 500); do sleep 0.01; done"""
    run = make_run(tmp_path, "a", script)

    def stop() -> None:
        while not (tmp_path / "began").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Stopped):
        run_here(tmp_path, [run], resume=False, max_jobs=1)
    thread.join()
    assert (tmp_path / "saved").exists() and signal.getsignal(signal.SIGTERM) == before
