"""The runs of a sweep on this machine: the same job scripts, a few at a time."""

import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tandem.launch.sweep.folder import Run
from tandem.launch.sweep.states import UNFINISHED, progress_of
from tandem.utils.errors import UserError
from tandem.utils.log import say
from tandem.utils.processes import Stopped

POLL_S = 0.1


def run_here(output_dir: Path, runs: Sequence[Run], *, resume: bool, max_jobs: int) -> bool:
    """Run what is not finished (with `resume`: what was begun), `max_jobs` at a time. Returns whether all went well."""
    wanted = UNFINISHED if resume else ("written", *UNFINISHED)
    items = [item for item in progress_of(output_dir, runs) if item.state in wanted or item.evaluation in wanted]
    waiting = [item.run for item in items]
    trained = [item.run.name for item in items if item.state == "finished"]
    for run in waiting:
        if run.nodes > 1:
            raise UserError(f"run {run.name!r} is for {run.nodes} nodes, and --local has one; set slurm.nodes: 1")
    before = signal.signal(signal.SIGTERM, _stop)
    under_way: list[_Started] = []
    went_well = True
    try:
        while waiting or under_way:
            while waiting and len(under_way) < max_jobs:
                run = waiting.pop(0)
                under_way.append(_Started(run, evaluates_only=run.name in trained))
            for started in [started for started in under_way if started.is_over()]:
                under_way.remove(started)
                went_well = went_well and started.went_well
            time.sleep(POLL_S)
    finally:
        for started in under_way:
            started.process.terminate()  # its script passes it on, and the run saves a checkpoint
        for started in under_way:
            started.process.wait()
        signal.signal(signal.SIGTERM, before)
    return went_well


class _Started:
    """A run under way: its script, then that of its evaluation."""

    def __init__(self, run: Run, *, evaluates_only: bool) -> None:
        self.run = run
        self.scripts = [] if evaluates_only else [run.script]
        self.scripts += [run.evaluation_script] if run.evaluates else []
        self.log = Path(run.folder) / "local.out"
        say(f"{run.name}: started, prints to {self.log}")
        self.process = self._start()

    @property
    def went_well(self) -> bool:
        return self.process.returncode == 0

    def is_over(self) -> bool:
        code = self.process.poll()
        if code == 0 and self.scripts:
            self.process = self._start()
            return False
        if code is not None:
            say(f"{self.run.name}: {'finished' if code == 0 else f'failed with exit code {code}'}")
        return code is not None

    def _start(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C reaches the sweep alone, which passes it on once.
            return subprocess.Popen(
                ["bash", self.scripts.pop(0)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _stop(number: int, _frame: object) -> None:
    raise Stopped(number, "stopped; `sweep FILE --local` goes on")
