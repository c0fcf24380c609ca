"""Starts the processes of a run, watches them, and ends all of them together.

Children write straight into their log files, so that nothing is lost if the supervisor dies; the kernel
then ends them too (utils.processes.die_with_supervisor), and launch/guard.py what they have started. Whatever ends
first ends the run: the trainer and the orchestrator by finishing, anyone by failing, the user by a signal, on which
the trainer first saves a checkpoint.
"""

import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tandem.launch.plan import ProcessPlan
from tandem.utils.errors import shorten
from tandem.utils.ports import handed_over
from tandem.utils.processes import REPEATED_WITHIN_S, SUPERVISOR_PID

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
    """The user or the system asked the run to stop."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal.Signals(signal_number).name)
        self.signal_number = signal_number


class Supervisor:
    """`listening`: what the inference server listens on, where the run has one. `save_timeout_s`: how long the trainer
    may take to save a checkpoint when a signal ends the run."""

    def __init__(
        self, plans: list[ProcessPlan], listening: socket.socket | None = None, save_timeout_s: float = 0.0
    ) -> None:
        self.plans = {plan.name: plan for plan in plans}
        self.listening = listening
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.save_timeout_s = save_timeout_s
        self._asked: tuple[int, float] | None = None  # the first signal, and when it came

    def run(self, on_tick: Callable[[], None]) -> None:
        """Start everything and wait for the end; no process is left when this returns or raises."""
        handlers = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for plan in self.plans.values():
                self._start(plan)
            while not self._is_finished():
                on_tick()
                time.sleep(POLL_S)
                if self._asked is not None:
                    self._signal_all(signal.SIGTERM)
                    self._let_trainer_save(on_tick)
                    raise Interrupted(self._asked[0])
            on_tick()
        finally:
            # A second Ctrl-C must not leave the clean-up half done.
            for number in handlers:
                signal.signal(number, signal.SIG_IGN)
            self.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """Ask every process group to end, then make it."""
        self._signal_all(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(process.poll() is None for process in self.processes.values()):
            time.sleep(POLL_S)
        self._signal_all(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()

    def _on_signal(self, number: int, _frame: object) -> None:
        """The first one is noted, for the loop to see; a second one, unless it is the same, ends the run at once."""
        if self._asked is None:
            self._asked = number, time.monotonic()
        elif time.monotonic() - self._asked[1] > REPEATED_WITHIN_S:
            raise Interrupted(number)

    def _let_trainer_save(self, on_tick: Callable[[], None]) -> None:
        """It has been told to end, and needs no other process for its checkpoint (trainer/checkpoints/stopping.py)."""
        trainer = self.processes.get("trainer")
        if trainer is None or self.save_timeout_s == 0:
            return
        deadline = time.monotonic() + self.save_timeout_s + POLL_S
        while trainer.poll() is None and time.monotonic() < deadline:
            on_tick()
            time.sleep(POLL_S)
        if trainer.poll() is None:
            logger.error("the trainer did not save a checkpoint in time; see %s", self.plans["trainer"].log)

    def _start(self, plan: ProcessPlan) -> None:
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | plan.environment | {SUPERVISOR_PID: str(os.getpid())}
        handed = self.listening if (plan.listens_as or plan.name) == "inference" else None
        if handed is not None:
            environment |= handed_over(handed)
        with plan.log.open("ab") as log:
            self.processes[plan.name] = subprocess.Popen(
                plan.command,
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
                raise RunFailed(self._explain(name, code))
        return all(codes[name] == 0 for name in WORKERS if name in codes)

    def _is_asked_to_end(self) -> bool:
        """A scheduler's signal goes to all processes of a job, and may have ended one before it is known here."""
        if self._asked is None:
            time.sleep(4 * POLL_S)
        return self._asked is not None

    def _explain(self, name: str, code: int) -> str:
        how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
        log = self.plans[name].log
        return f"the {name} process ended with {how}. Its last lines ({log}):\n{last_lines(log)}"

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.processes.values():
            # The group outlives its leader when the leader left children behind: signal it in any case.
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                continue


def last_lines(log: Path) -> str:
    """What a process said last, each line of it bounded, and the log read from its end only."""
    if not log.exists():
        return "  (nothing was logged)"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(f"  {shorten(line)}" for line in lines) or "  (nothing was logged)"
