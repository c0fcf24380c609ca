"""Real processes: started as a user starts them, ended by pid, read through the files they write."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.patience import PATIENCE
from tests.ports import free_port

# Two cores are shared by everything a test starts: one thread each keeps spinning threads off each other.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200"}


IN_TURN = Path(__file__).with_name("in_turn.py")


def command(entrypoint: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"tandem.entrypoints.{entrypoint}", *arguments]


def run_in_turn(*commands: list[str], num_ranks: int = 1) -> str:
    """What several commands (an entrypoint and its arguments each) say, one after the other in one process."""
    launcher = [sys.executable]
    if num_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [*launcher, str(IN_TURN), json.dumps(commands), json.dumps([free_port() for _ in commands])],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=480 * PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@dataclass
class Starter:
    """Starts entrypoints and ends what is left of them."""

    started: list[subprocess.Popen[str]] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=lambda: dict(ENVIRONMENT))

    def add_to_path(self, folder: Path) -> None:
        """Make modules in `folder` importable for what is started from here on."""
        others = self.environment.get("PYTHONPATH")
        self.environment["PYTHONPATH"] = f"{folder}{os.pathsep}{others}" if others else str(folder)

    def start(self, entrypoint: str, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command(entrypoint, *arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, entrypoint: str, *arguments: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
        """Run to the end, within a time."""
        process = self.start(entrypoint, *arguments)
        output, _ = process.communicate(timeout=timeout_s * PATIENCE)
        return subprocess.CompletedProcess(process.args, process.returncode, output)

    def end_all(self) -> None:
        for process in self.started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout:
                process.stdout.close()


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """`timeout_s` is for an idle machine."""
    timeout_s *= PATIENCE
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}"
        time.sleep(0.05)


def children_of(pid: int) -> dict[str, int]:
    """The processes of a run by name: pid of each entrypoint whose parent is `pid`."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            arguments = (folder / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == pid:
            names = [
                argument.rpartition(".")[2] for argument in arguments if argument.startswith("tandem.entrypoints.")
            ]
            found |= {name: int(folder.name) for name in names}
    return found


def is_alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
