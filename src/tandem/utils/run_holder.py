"""Who holds a run directory, as its lock files say (utils/run_lock.py), and whether they still do."""

import json
import logging
import os
import shlex
import socket
import stat
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_type_hints

from tandem.utils.errors import UserError
from tandem.utils.processes import process_exists, process_state, start_time

logger = logging.getLogger(__name__)
STALE_S = 60.0
MOST_PID = 2**31 - 1


@dataclass(frozen=True)
class Holder:
    """What a lock file holds. `machine` is None where processes cannot be looked up by pid."""

    token: str
    command: str
    host: str
    machine: str | None
    pid: int
    process_started: int | None
    since: str

    @classmethod
    def this_process(cls, command: str) -> "Holder":
        return cls(
            token=uuid.uuid4().hex,
            command=command,
            host=socket.gethostname(),
            machine=_this_machine(),
            pid=os.getpid(),
            process_started=start_time(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )

    @classmethod
    def decode(cls, content: bytes) -> "Holder | None":
        """None where the content is damaged."""
        try:
            record = json.loads(content)
            holder = cls(**{key: value for key, value in record.items() if key != "beat"})
        except (ValueError, TypeError, AttributeError, RecursionError):
            return None
        has_types = all(isinstance(getattr(holder, name), kind) for name, kind in get_type_hints(cls).items())
        return holder if has_types and 0 < holder.pid <= MOST_PID else None

    def encode(self, beat: int) -> bytes:
        """Of the same length at every beat, so that it is written in place."""
        return (json.dumps(asdict(self) | {"beat": f"{beat:020d}"}) + "\n").encode()

    def is_on_this_machine(self) -> bool:
        return self.machine is not None and self.machine == _this_machine()

    def is_alive(self) -> bool:
        """Asked on its own machine only."""
        started = start_time(self.pid)
        if started is None:
            return process_exists(self.pid)  # of another user, and hidden
        return started == self.process_started and process_state(self.pid) not in ("Z", "X")

    def describe(self) -> str:
        look = f"ps -fp {self.pid}"
        command = look if self.is_on_this_machine() else f"ssh {shlex.quote(self.host)} {look}"
        return (
            f"`{self.command}` (pid {self.pid} on {self.host}, since {self.since}); look at it with: {command}; "
            "wait for it, end it, or choose another --output-dir"
        )


def read_holder(path: Path) -> Holder | None:
    """None where there is no lock, or none that can be read."""
    try:
        return Holder.decode(path.read_bytes()) if path.is_file() else None
    except OSError:
        return None


def is_held(path: Path, holder: Holder | None) -> bool:
    """Whether the lock is not stale; of another machine, that takes watching."""
    if holder is not None and holder.is_on_this_machine():
        return holder.is_alive()
    logger.warning("%s: watching for up to %g s whether its owner on another machine is alive", path, STALE_S)
    return _changes(lambda: lock_bytes(path))


def _changes(look: Callable[[], bytes | None]) -> bool:
    before, deadline = look(), time.monotonic() + STALE_S
    while before is not None and time.monotonic() < deadline:
        time.sleep(min(0.2, STALE_S / 10))
        now = look()
        if now is None:
            return False  # released meanwhile
        if now != before:
            return True
    return False


def lock_bytes(path: Path) -> bytes | None:
    """None where there is no lock. UserError where something else stands in its place: nobody will release it."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            raise UserError(f"{path} is no file, so it is no lock; remove it")
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"the lock {path} cannot be read: {error.strerror}; remove it if nothing runs there") from error


def _this_machine() -> str | None:
    """Equal exactly where a pid means the same process: one boot of one system, one namespace of processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return None
