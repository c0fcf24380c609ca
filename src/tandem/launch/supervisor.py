"""Starts the processes of a run, watches them, and ends all of them together.

Children write straight into their log files, so that nothing is lost if the supervisor dies; the kernel
then ends them too (utils.processes.die_with_supervisor). Whatever ends first ends the run: the trainer and
the orchestrator by finishing, anyone by failing, the user by a signal.
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from tandem.launch.plan import ProcessPlan
from tandem.utils.ports import handed_over
from tandem.utils.processes import SUPERVISOR_PID

POLL_S = 0.05
GRACE_S = 6.0
LAST_LINES = 15

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
    """`listening`: what the inference server listens on, where the run has one."""

    def __init__(self, plans: list[ProcessPlan], listening: socket.socket | None = None) -> None:
        self.plans = {plan.name: plan for plan in plans}
        self.listening = listening
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def run(self, on_tick: Callable[[], None]) -> None:
        """Start everything and wait for the end; no process is left when this returns or raises."""
        handlers = {number: signal.signal(number, _raise_interrupted) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            for plan in self.plans.values():
                self._start(plan)
            while not self._is_finished():
                on_tick()
                time.sleep(POLL_S)
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

    def _start(self, plan: ProcessPlan) -> None:
        plan.log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | plan.environment | {SUPERVISOR_PID: str(os.getpid())}
        handed = self.listening if plan.name == "inference" else None
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
            if code is not None and (code != 0 or name not in WORKERS):
                raise RunFailed(self._explain(name, code))
        return all(codes[name] == 0 for name in WORKERS if name in codes)

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
    lines = log.read_text(errors="replace").splitlines()[-LAST_LINES:] if log.exists() else []
    return "\n".join(f"  {line}" for line in lines) or "  (nothing was logged)"


def _raise_interrupted(signal_number: int, _frame: object) -> None:
    raise Interrupted(signal_number)
