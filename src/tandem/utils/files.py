"""Files that are never seen half-written.

Writers put everything under a temporary name, flush it to disk and rename it; a directory is
complete only once its marker file is there. Readers trust markers and nothing else.
"""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

import orjson

from tandem.utils.errors import UserError, naming_file
from tandem.utils.secrets import holds_secret

logger = logging.getLogger(__name__)

# Of a model in several files; vLLM, SGLang and transformers know it by this name.
INDEX = "model.safetensors.index.json"
# What is kept of a line that does not end.
MAX_LINE_BYTES = 2**20
WRITTEN = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC


def fsync_path(path: Path) -> None:
    """Flush a file or a directory entry to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes, *, flush: bool = True, private: bool = False) -> None:
    """Write `content` so that `path` holds either the old bytes or all of the new ones. Without `flush` this holds for
    other processes, not for a crash of the machine. What is private only the user can read."""
    path.parent.mkdir(exist_ok=True)  # not its parents: a run directory that was moved away is not made again
    temporary = staging_path(path)
    try:
        with naming_file(path), os.fdopen(os.open(temporary, WRITTEN, 0o600 if private else 0o666), "wb") as file:
            file.write(content)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk is not made fuller
        raise
    if flush:
        fsync_path(path.parent)


def write_json(path: Path, value: Any, *, flush: bool = True) -> None:
    write_atomic(path, json_text(value), flush=flush)


def write_config(path: Path, tree: Mapping[str, Any]) -> None:
    """JSON that only the user can read if a secret is in it."""
    write_atomic(path, json_text(tree), private=holds_secret(tree))


def json_text(value: Any) -> bytes:
    """JSON as people like to read it."""
    return (json.dumps(value, indent=2) + "\n").encode()


def json_bytes(body: Any) -> bytes:
    """On one line, with what orjson refuses: half of a surrogate pair, as an escape, and numbers beyond 64 bits."""
    try:
        return orjson.dumps(body)
    except TypeError:
        return json.dumps(body).encode()


def open_regular(path: Path) -> BufferedReader:
    """A file to read, in a folder that others may have written: a pipe would block the reader until somebody writes.
    Raises UserError for what is no file."""
    return os.fdopen(_open_regular(path, os.O_RDONLY), "rb")


def _open_regular(path: Path, flags: int) -> int:
    refusal = f"{path} is not a regular file; put a file in its place"
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP):
            raise UserError(refusal) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(refusal)
    return descriptor


def read_regular(path: Path) -> bytes:
    with open_regular(path) as file:
        return file.read()


def require_regular(path: Path) -> None:
    """Before a library opens it by its name."""
    open_regular(path).close()


def read_json(path: Path) -> Any:
    return json.loads(read_regular(path))


def read_table(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises UserError where it holds anything else."""
    content = read_regular(path)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def is_plain(name: str) -> bool:
    """Whether a name leads to a file below the directory it is used in, and nowhere else."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def index_names(index: Path) -> list[str]:
    """The files that model.safetensors.index.json divides a model among; all of them next to it."""
    names = read_table(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) and is_plain(name) for name in names.values()):
        raise UserError(f"{index}: weight_map must name a file in this directory for every tensor")
    return sorted(set(names.values()))


def publish_directory(staging: Path, final: Path, *, flush: bool = True) -> None:
    """Flush every file of `staging` and rename it to `final`, replacing an unfinished one. Without `flush` that is left
    to the caller, for whom a crash may leave a directory that does not match its checksums."""
    readable = staging.stat().st_mode & 0o666
    for file in staging.rglob("*"):
        if file.is_file():
            file.chmod(readable)  # some libraries write files for their owner only
    if flush:
        flush_directory(staging)
    remove(final)
    staging.rename(final)
    if flush:
        fsync_path(final.parent)


def flush_directory(folder: Path) -> None:
    for path in folder.rglob("*"):
        fsync_path(path)
    fsync_path(folder)


def staging_path(final: Path) -> Path:
    """Where this process fills what becomes `final`."""
    return final.with_name(f".{final.name}.{os.getpid()}.tmp")


def staging_directory(final: Path) -> Path:
    """A fresh, empty directory next to `final`, to be filled and then published."""
    staging = staging_path(final)
    remove(staging)
    final.parent.mkdir(exist_ok=True)
    staging.mkdir()
    return staging


def remove(path: Path) -> None:
    """Whatever is there, if anything; of a link the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def append_json_line(path: Path, value: Any) -> None:
    """Append one line."""
    line = (json.dumps(value) + "\n").encode()
    with _locked_lines(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            line = b"\n" + line  # whoever wrote the last one was killed halfway
        if os.write(descriptor, line) != len(line):
            os.ftruncate(descriptor, size)  # the next line would be damaged by half of this one
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def keep_lines(path: Path, choose: Callable[[list[bytes]], list[bytes]]) -> int:
    """Leave out the lines that `choose` does not return, while other processes may append. Returns how many."""
    if not path.exists():
        return 0
    with _locked_lines(path) as descriptor, os.fdopen(descriptor, "rb", closefd=False) as file:
        lines = file.read().splitlines(keepends=True)
        kept = choose(lines)
        if len(kept) < len(lines):
            write_atomic(path, b"".join(kept))
    return len(lines) - len(kept)


@contextmanager
def _locked_lines(path: Path) -> Iterator[int]:
    """A file of lines, open at its end. The lock keeps lines of several processes whole, on network file systems too;
    one that was replaced while the lock was waited for is opened again."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            with naming_file(path):
                fcntl.lockf(descriptor, fcntl.LOCK_EX)
                if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                    yield descriptor
                    return
        finally:
            os.close(descriptor)


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a JSON-lines file; none if there is no file yet. Damaged ones are left out and counted."""
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    records = [parse_json_line(line) for line in lines]
    whole = [record for record in records if record is not None]
    if len(whole) < len(lines):
        logger.warning("%s: %d damaged lines are left out", path, len(lines) - len(whole))
    return whole


def parse_json_line(line: bytes | str) -> dict[str, Any] | None:
    """One line of a JSON-lines file; None if it is blank, damaged, or no table of keys."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def is_number(value: Any) -> TypeGuard[float]:
    """Whether a value of a line can be printed as a number. A damaged one may be text, or longer than a float."""
    return isinstance(value, float) or (type(value) is int and abs(value) <= sys.float_info.max)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; the others wait. The lock is the file `path`, which stays."""
    with os.fdopen(_open_regular(path, os.O_RDWR | os.O_CREAT), "r+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


class Follower:
    """New complete lines of a growing file, each byte of which is read once. Of a longer line than MAX_LINE_BYTES only
    the beginning is kept."""

    def __init__(self, path: Path, *, from_end: bool = False) -> None:
        self.path = path
        self._offset = path.stat().st_size if from_end and path.exists() else 0
        self._unfinished = b""

    def lines(self) -> Iterator[str]:
        if not self.path.exists():
            return
        with self.path.open("rb", buffering=0) as file:
            # A file that was cut (a run that goes back to a checkpoint) is followed from its new end.
            if (size := os.fstat(file.fileno()).st_size) < self._offset:
                self._offset, self._unfinished = size, b""
            file.seek(self._offset)
            while chunk := file.read(MAX_LINE_BYTES):
                self._offset += len(chunk)
                *complete, rest = chunk.split(b"\n")
                for part in complete:
                    line, self._unfinished = self._unfinished + part, b""
                    yield line[:MAX_LINE_BYTES].decode(errors="replace")
                self._unfinished = (self._unfinished + rest)[:MAX_LINE_BYTES]


def checksum(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
