"""Starts the processes of a run, watches them, and ends all of them together.

Children write straight into their log files, so that nothing is lost if the supervisor dies; the kernel
then ends them too (utils.processes.die_with_supervisor), and launch/guard.py what they have started. The run ends when
the trainer and the orchestrator have finished, or by a signal, on which the trainer first saves a checkpoint. Whoever
fails is started again (launch/restarts.py), or ends the run.
"""

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from tandem.launch.plan import ProcessPlan
from tandem.launch.restarts import Restarts
from tandem.utils.errors import BrokenRunDirectory, shorten
from tandem.utils.ports import handed_over
from tandem.utils.processes import REPEATED_WITHIN_S, SUPERVISOR_PID, describe_exit
from tandem.utils.run_lock import gone

logger = logging.getLogger(__name__)

POLL_S = 0.05
GRACE_S = 6.0
LAST_LINES = 15
TAIL_BYTES = 1 << 18

# Processes whose end is the end of the run; the others serve until they are told to stop.
WORKERS = ("orchestrator", "trainer")


class RunFailed(RuntimeError):
    """A process of the run failed: which one, its last lines, its log."""


class Interrupted(Exception):
    """The user or the system asked the run to stop: by a signal, or by what `by` says."""

    def __init__(self, signal_number: int, by: str | None = None) -> None:
        super().__init__(by or signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Supervisor:
    """`listening`: what each inference server listens on. `save_timeout_s`: how long the trainer may take to save a
    checkpoint when the run is ended. `restarts`: who is started again; left out, nobody. `is_stop_wanted`: whether
    somebody has asked for the end by other means than a signal."""

    def __init__(
        self,
        plans: list[ProcessPlan],
        listening: Mapping[str, socket.socket] | None = None,
        save_timeout_s: float = 0.0,
        restarts: Restarts | None = None,
        is_stop_wanted: Callable[[], bool] = lambda: False,
    ) -> None:
        self.plans = {plan.name: plan for plan in plans}
        self.listening = listening or {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.save_timeout_s = save_timeout_s
        self.restarts = restarts
        self.is_stop_wanted = is_stop_wanted
        self._on_tick: Callable[[], None] = lambda: None
        self._asked: tuple[int, float] | None = None  # the first signal, and when it came
        self._asked_by: str | None = None

    def run(self, on_tick: Callable[[], None]) -> None:
        """Start everything and wait for the end; no process is left when this returns or raises."""
        self._on_tick = on_tick
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for plan in self.plans.values():
                self._start(plan)
            while not self._is_finished():
                self._tick()
                if self._asked is not None:
                    self._signal_all(signal.SIGTERM)
                    self._let_trainer_save()
                    raise Interrupted(self._asked[0], self._asked_by)
            on_tick()
        finally:
            # A second Ctrl-C must not leave the clean-up half done.
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)
            self.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def stop(self, names: Collection[str] | None = None) -> None:
        """Ask every process group to end, or those of `names`, then make it."""
        ended = [process for name, process in self.processes.items() if names is None or name in names]
        _signal_groups(ended, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(process.poll() is None for process in ended):
            time.sleep(POLL_S)
        _signal_groups(ended, signal.SIGKILL)
        for process in ended:
            process.wait()

    def _tick(self) -> None:
        """What is done again and again, whatever is waited for."""
        self._on_tick()
        time.sleep(POLL_S)
        if self._asked is None and self.is_stop_wanted():
            self._asked = signal.SIGTERM, time.monotonic()
            self._asked_by = "`rl --stop`"

    def _on_signal(self, number: int, _frame: object) -> None:
        """The first one is noted, for the loop to see; a second one, unless it is the same, ends the run at once."""
        if self._asked is None:
            self._asked = number, time.monotonic()
        elif time.monotonic() - self._asked[1] > REPEATED_WITHIN_S:
            raise Interrupted(number)

    def _let_trainer_save(self) -> None:
        """It has been told to end, and needs no other process for its checkpoint (trainer/checkpoints/stopping.py)."""
        trainer = self.processes.get("trainer")
        if trainer is None or self.save_timeout_s == 0:
            return
        deadline = time.monotonic() + self.save_timeout_s + POLL_S
        while trainer.poll() is None and time.monotonic() < deadline:
            self._tick()
        if trainer.poll() is None:
            logger.error("the trainer did not save a checkpoint in time; see %s", self.plans["trainer"].log)

    def _restart(self, name: str, code: int) -> None:
        """Start a process again that has failed, and with it whoever has to go back; RunFailed where that is no use."""
        if self.restarts is not None and not self.restarts.run_dir.root.is_dir():
            raise BrokenRunDirectory(gone(self.restarts.run_dir.root))  # which is why the process failed
        delay_s = None if self.restarts is None else self.restarts.next_delay_s(name, code)
        if self.restarts is None or delay_s is None:
            if self.restarts is not None:
                self.restarts.log.event("failed", who=name, why=self._why(name, code))
            raise RunFailed(self._explain(name, code))
        log = self.plans[name].log
        why = self._why(name, code)
        logger.warning("the %s process ended with %s and is started again; see %s", name, describe_exit(code), log)
        _signal_groups([self.processes[name]], signal.SIGKILL)  # what it leaves behind would be in the way
        again = WORKERS if name in WORKERS else (name,)
        if name == "orchestrator":
            _signal_groups([self.processes["trainer"]], signal.SIGTERM)
            self._let_trainer_save()
        self.stop(again)
        resumes_at = time.monotonic() + delay_s
        while time.monotonic() < resumes_at:
            self._tick()
            if self._asked is not None:
                return  # by the user: the loop ends the run
        step = self.restarts.go_back() if name in WORKERS else None
        for plan in [self.plans[other] for other in again if other in self.plans]:
            self._start(plan, ["--resume"] if step else [])
        self.restarts.record(name, why, step)

    def _start(self, plan: ProcessPlan, more: Sequence[str] = ()) -> None:
        plan.log.parent.mkdir(exist_ok=True)
        environment = os.environ | plan.environment | {SUPERVISOR_PID: str(os.getpid())}
        handed = self.listening.get(plan.listens_as or plan.name)
        if handed is not None:
            environment |= handed_over(handed)
        with plan.log.open("ab") as log:
            self.processes[plan.name] = subprocess.Popen(
                [*plan.command, *more],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
                pass_fds=() if handed is None else (handed.fileno(),),
            )

    def _is_finished(self) -> bool:
        codes = {name: process.poll() for name, process in self.processes.items()}
        for name, code in codes.items():
            if code is not None and (code != 0 or name not in WORKERS) and not self._is_asked_to_end():
                self._restart(name, code)
                return False
        return all(codes[name] == 0 for name in WORKERS if name in codes)

    def _is_asked_to_end(self) -> bool:
        """A scheduler's signal goes to all processes of a job, and may have ended one before it is known here."""
        if self._asked is None:
            time.sleep(4 * POLL_S)
        return self._asked is not None

    def _explain(self, name: str, code: int) -> str:
        log = self.plans[name].log
        return f"the {name} process ended with {describe_exit(code)}. Its last lines ({log}):\n{last_lines(log)}"

    def _why(self, name: str, code: int) -> str:
        """How it ended, and what it said last, where it ended by itself."""
        said = tail(self.plans[name].log, 1) if code > 0 else []
        return ": ".join([describe_exit(code), *said])

    def _signal_all(self, number: signal.Signals) -> None:
        _signal_groups(self.processes.values(), number)


def _signal_groups(processes: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in processes:
        # The group outlives its leader when the leader left children behind: signal it in any case.
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            continue


def last_lines(log: Path) -> str:
    return "\n".join(f"  {line}" for line in tail(log, LAST_LINES) or ["(nothing was logged)"])


def tail(log: Path, num_lines: int) -> list[str]:
    """What a process said last, each line of it bounded, and the log read from its end only."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return [shorten(line) for line in lines if line.strip()][-num_lines:]
