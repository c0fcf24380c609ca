"""One owner a run directory: `trainer.lock` and `orchestrator.lock`, one for each role in a run.

A command takes the roles that it fills before it touches anything: `rl`, `sft` and `align` both, `trainer` and
`orchestrator` their own. The file appears by a hard link, which one of several succeeds with on any file system, also
across nodes; it says who holds it, and its owner changes it every few seconds.

    same machine    the lock is stale if its process is gone, or is another one by its start time
    elsewhere       the lock is stale if it did not change for a minute while it was watched: clocks need not agree

What a command starts (the processes of `rl`, the ranks of torchrun) finds the lock in its environment: it is covered
by it, and keeps it fresh as well, so that a run whose supervisor is stopped does not look dead from another machine.
"""

import errno
import logging
import os
import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tandem.utils.errors import NO_ROOM, BrokenRunDirectory, UserError, is_unwritable
from tandem.utils.files import remove
from tandem.utils.log import say
from tandem.utils.processes import is_first_rank, process_state
from tandem.utils.run_content import FOLDER, kind_of, refuse_misshapen
from tandem.utils.run_holder import Holder, is_held, lock_bytes, read_holder

logger = logging.getLogger(__name__)

ROLES = ("orchestrator", "trainer")  # always taken in this order
BEAT_S = 5.0
CLAIM_S = 5.0
TOKEN = "TANDEM_RUN_LOCK"
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # a file system without hard links


@contextmanager
def hold_run(root: Path, command: str, roles: Sequence[str] = ROLES) -> Iterator[None]:
    """Own these roles of the run in `root`; UserError if another process does, or if something else is where a run has
    its files. Of several ranks, the first one owns."""
    if not is_first_rank():
        yield
        return
    holder = Holder.this_process(command)
    locks: list[RunLock] = []
    with ExitStack() as stack:
        stack.callback(_remove_empty, _make_directory(root))
        for role in roles:
            path = root / f"{role}.lock"
            owner = read_holder(path)
            if owner is not None and owner.token == os.environ.get(TOKEN):
                holder = owner
                lock = RunLock(path, owner)
            else:
                lock = take(path, holder)
            stack.callback(lock.release)
            locks.append(lock)
        refuse_misshapen(root)
        stack.enter_context(_told_to_children(holder.token))
        with _telling_what_broke(locks[-1]):
            yield


@contextmanager
def _telling_what_broke(lock: "RunLock") -> Iterator[None]:
    """In one line, where it is the run directory: it was moved away, or holds something else than a run left there."""
    root = lock.path.parent
    try:
        with naming_damage(root, "the run"):
            yield
    except Exception as error:  # answers: says what is behind it
        if not lock.is_in_place():
            raise BrokenRunDirectory(gone(root)) from error
        raise


@contextmanager
def naming_damage(root: Path, what: str) -> Iterator[None]:
    """Whatever else the file system says of a file below `root`, in one line; `what` lies there."""
    try:
        yield
    except OSError as error:
        if is_unwritable(error) or not _is_below(root, error.filename):
            raise
        raise BrokenRunDirectory(
            f"{what} in output_dir = {str(root)!r} is damaged: {error.filename}: {error.strerror}"
        ) from error


def _is_below(root: Path, filename: object) -> bool:
    if not isinstance(filename, str):
        return False
    return any(Path(whole(filename)).is_relative_to(whole(root)) for whole in (os.path.abspath, os.path.realpath))


def gone(root: Path) -> str:
    """Why a process ends whose lock is not where it was."""
    if root.is_dir():
        return f"the lock in {root} was taken or removed: this process ends, so that no two write to one run"
    return (
        f"output_dir = {str(root)!r} was renamed or deleted under the run, which ends; where it was renamed, continue "
        "with --resume and the new name"
    )


@contextmanager
def _told_to_children(token: str) -> Iterator[None]:
    before = os.environ.get(TOKEN)
    os.environ[TOKEN] = token
    try:
        yield
    finally:
        del os.environ[TOKEN]
        if before is not None:
            os.environ[TOKEN] = before


def take(path: Path, holder: Holder) -> "RunLock":
    """Create the lock, in place of a stale one; UserError if it is held."""
    while True:
        with refuse_unwritable(path.parent):
            created = _create(path, holder)
        if created:
            return RunLock(path, holder)
        content = lock_bytes(path)
        if content is None:
            continue  # released meanwhile
        found = Holder.decode(content)
        if is_held(path, found):
            holds = read_holder(path) or found  # it may have changed hands while it was watched
            who = "another process" if holds is None else holds.describe()
            raise UserError(f"output_dir = {str(path.parent)!r} is in use by {who}")
        _remove_stale(path, found)


class RunLock:
    """A lock that is held, or that covers this process; a thread keeps it fresh until `release`."""

    def __init__(self, path: Path, holder: Holder) -> None:
        self.path = path
        self.holder = holder
        self._released = threading.Event()
        self._file = path.open("r+b", buffering=0)
        self._thread = threading.Thread(target=self._keep, name="run-lock", daemon=True)
        self._thread.start()

    @property
    def is_own(self) -> bool:
        """Held by this process, or by what it was before it became torchrun and started this rank."""
        return self.holder.pid == os.getpid() or ("RANK" in os.environ and self.holder.pid == os.getppid())

    def release(self) -> None:
        self._released.set()
        self._thread.join(BEAT_S)
        try:
            if self.is_own and self.is_in_place():
                self.path.unlink(missing_ok=True)
        except OSError as error:  # the run may be ending for the same reason, and its own error is the one to show
            logger.warning("the lock %s could not be removed: %s", self.path, error.strerror)
        self._file.close()

    def _keep(self) -> None:
        num_lost = 0
        warned = False
        while not self._released.wait(BEAT_S):
            self._beat()
            # Twice: a shared file system may fail to answer for a moment.
            num_lost = 0 if self.is_in_place() else num_lost + 1
            if num_lost > 1:
                _leave(gone(self.path.parent))
            if not self.is_own and not warned and self.holder.is_on_this_machine():
                warned = self._warn_if_stopped()

    def _beat(self) -> None:
        """Through the open file: it cannot overwrite the lock of another process."""
        try:
            os.pwrite(self._file.fileno(), self.holder.encode(time.monotonic_ns()), 0)
            os.fsync(self._file.fileno())
        except OSError as error:
            logger.warning("the lock %s could not be kept fresh: %s", self.path, error)

    def is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError:
            return False

    def _warn_if_stopped(self) -> bool:
        stopped = process_state(self.holder.pid) in ("T", "t")
        if stopped:
            logger.warning(
                "`%s` (pid %d) is stopped: the run continues unsupervised; wake it with: kill -CONT %d",
                *(self.holder.command, self.holder.pid, self.holder.pid),
            )
        return stopped


def _create(path: Path, holder: Holder) -> bool:
    """The whole file at once, or not at all."""
    content = holder.encode(time.monotonic_ns())
    temporary = path.with_name(f".{path.name}.{holder.token}.tmp")
    try:
        temporary.write_bytes(content)
        try:
            os.link(temporary, path)
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            with path.open("xb") as file:
                file.write(content)
    except FileExistsError:
        return False
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    return True


def _remove_stale(path: Path, examined: Holder | None) -> None:
    """Unless another process took the lock meanwhile. One at a time: what was examined is then what is removed."""
    claim = path.with_name(f".{path.name}.stale")
    try:
        claim.touch(exist_ok=False)
    except FileExistsError:
        _await_removal(claim)
        return
    except FileNotFoundError:
        return  # the directory itself is gone
    try:
        if read_holder(path) == examined:
            path.unlink(missing_ok=True)
    finally:
        claim.unlink(missing_ok=True)


def _await_removal(claim: Path) -> None:
    """It is there for a moment, unless its process was killed in that moment."""
    deadline = time.monotonic() + CLAIM_S
    while os.path.lexists(claim):
        if time.monotonic() > deadline:
            remove(claim)
        time.sleep(0.01)


def _make_directory(root: Path) -> list[Path]:
    """The directories that were not there before, innermost first."""
    missing = [folder for folder in (root, *root.parents) if not folder.exists()]
    with refuse_unwritable(root):
        if (found := kind_of(root)) not in (None, FOLDER):
            raise UserError(f"output_dir = {str(root)!r} is {found}; give a directory")
        root.mkdir(parents=True, exist_ok=True)
    return missing


def _remove_empty(folders: Sequence[Path]) -> None:
    """A command that was refused leaves nothing behind."""
    with suppress(OSError):
        for folder in folders:
            folder.rmdir()


@contextmanager
def refuse_unwritable(root: Path, option: str = "--output-dir") -> Iterator[None]:
    """Where nothing has started yet, a run directory that cannot be written is a user's mistake; `option` names it."""
    try:
        yield
    except OSError as error:
        if not is_unwritable(error) and not isinstance(error, FileNotFoundError | NotADirectoryError | FileExistsError):
            raise
        fix = "free some space, or choose" if error.errno in NO_ROOM else "choose"
        reason = error.strerror
        if isinstance(error, FileExistsError):
            reason = f"{error.filename} is not a folder"
        if error.errno == errno.EPERM:  # permissions would be EACCES
            reason = f"{reason} (it may be immutable: lsattr -d {shlex.quote(str(root))})"
        raise UserError(f"output_dir = {str(root)!r} cannot be written: {reason}; {fix} another {option}") from error


def _leave(reason: str) -> None:
    say(reason, error=True)
    os._exit(1)
