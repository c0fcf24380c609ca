"""Which process of a run is started again after it failed, how often, and where the run goes on from.

    inference       by itself: the orchestrator waits, gives the new server its weights and sends open requests again
    orchestrator    the trainer saves a checkpoint first; both go on from there
    trainer         both go on from the newest complete checkpoint, or begin again where there is none

A run that has not made a step yet is not restarted: what fails that early is a mistake, and the same again next time.
"""

from collections import Counter

from tandem.trainer.checkpoints.history import newest_checkpoint, rewind
from tandem.utils.files import read_json_lines
from tandem.utils.metrics import GAVE_UP, RunLog, read_metrics
from tandem.utils.processes import REFUSED, UNUSABLE
from tandem.utils.run_dir import RunDir

MOST_DELAY_S = 60.0


def delay_before_s(restart: int, first_s: float) -> float:
    """Before the n-th restart of a process: it doubles from one to the next."""
    return min(first_s * 2 ** min(restart - 1, 30), MOST_DELAY_S)


class Restarts:
    """`max_restarts`: of each process. `delay_s`: before the first of them; it doubles from one to the next."""

    def __init__(self, run_dir: RunDir, max_restarts: int, delay_s: float) -> None:
        self.run_dir = run_dir
        self.max_restarts = max_restarts
        self.delay_s = delay_s
        self.log = RunLog(run_dir, "rl")
        self._counts: Counter[str] = Counter()
        # Lines of earlier starts are told by their number: clocks may be set back, and differ between machines.
        self._steps_before = self._count_steps()
        self._given_up_before = self._count_given_up()
        self._has_begun = False

    def next_delay_s(self, name: str, code: int) -> float | None:
        """How long to wait before the process is started again; None: the run has failed."""
        self._has_begun = self._has_begun or self._count_steps() > self._steps_before
        gave_up = self._count_given_up()[name] > self._given_up_before[name]
        is_final = code in (REFUSED, UNUSABLE) or gave_up or not self._has_begun
        if is_final or self._counts[name] >= self.max_restarts:
            return None
        self._counts[name] += 1
        return delay_before_s(self._counts[name], self.delay_s)

    def go_back(self) -> int:
        """Take the run directory back to where trainer and orchestrator go on from. Returns the step; 0: the start."""
        step = newest_checkpoint(self.run_dir) or 0
        rewind(self.run_dir, step)
        return step

    def record(self, name: str, why: str, step: int | None) -> None:
        """Into events.jsonl; `step` is where the run goes on from, where it goes back."""
        went_back = {} if step is None else {"step": step}
        self.log.event("restarted", who=name, why=why, restart=self._counts[name], **went_back)

    def _count_steps(self) -> int:
        return sum(line["process"] == "trainer" for line in read_metrics(self.run_dir))

    def _count_given_up(self) -> Counter[str]:
        """By process. Nobody takes lines out of events.jsonl."""
        events = read_json_lines(self.run_dir.events)
        return Counter(str(event.get("process")) for event in events if event.get("event") == GAVE_UP)
