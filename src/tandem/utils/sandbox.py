"""Untrusted Python in a process of its own: no network, no files but its folder's, no other processes, bounded in all.

    run_python ─► a folder ─► sandbox_child.py: Landlock (files), seccomp (system calls), rlimits ─► the code
         └── watches time, output, threads and disk; kills the process, and removes the folder

Needs Linux on x86-64 or aarch64 with Landlock (5.13 or newer), and no privileges. Elsewhere it refuses: see
`why_unprotected`. Code in the sandbox can read Python's library and installed packages, and see which files exist.
Environments and rewards use it. Torch-free.
"""

import asyncio
import base64
import ctypes
import functools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from asyncio.subprocess import Process, SubprocessStreamProtocol
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.utils.errors import shorten
from tandem.utils.sandbox_child import CREATE_RULESET, STATUS, VERSION_ONLY
from tandem.utils.seccomp import ARCHITECTURES, make_filter

CHILD = Path(__file__).with_name("sandbox_child.py")
STARTUP_S = 60.0
WATCH_S = 0.05
DRAIN_S = 5.0
STREAM_BYTES = 1 << 16
MAX_THREADS = 64
MAX_FILES = 1000
MAX_OPEN_FILES = 128
# What programs read besides Python's own folders: shared libraries, time zones, random numbers.
SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
# A line of /proc/pid/status. Another one holds the name, which the code chooses, but for line feeds.
THREADS = re.compile(rb"^Threads:\s*(\d+)$", re.MULTILINE)


class SandboxUnavailable(RuntimeError):
    """The kernel cannot protect this machine from the code, so it did not run."""


@dataclass(frozen=True)
class SandboxResult:
    """How the code ended. `exit_code` is negative where a signal ended it."""

    stdout: str
    stderr: str
    exit_code: int
    stopped: str | None = None  # the limit it went over: "time", "output", "threads" or "disk"
    wall_s: float = 0.0

    @property
    def timed_out(self) -> bool:
        return self.stopped == "time" or self.exit_code == -signal.SIGXCPU

    @property
    def succeeded(self) -> bool:
        return self.exit_code == 0 and self.stopped is None


@dataclass(frozen=True)
class Limits:
    """Of one run. `timeout_s` bounds wall and CPU time; memory is address space, as the kernel counts it. `disk_mb`
    bounds each file at once, and all together every WATCH_S and at the end: code may write more for a moment."""

    timeout_s: float = 10.0
    memory_mb: int = 512
    output_kb: int = 256
    disk_mb: int = 64

    @property
    def rlimits(self) -> dict[str, int]:
        return {
            "RLIMIT_CPU": math.ceil(self.timeout_s) + 1,
            "RLIMIT_AS": self.memory_mb << 20,
            "RLIMIT_FSIZE": self.disk_mb << 20,
            "RLIMIT_NOFILE": MAX_OPEN_FILES,
            "RLIMIT_CORE": 0,
        }


@functools.cache
def why_unprotected() -> str | None:
    """What this machine lacks to run code safely; None where nothing is missing."""
    if sys.platform != "linux":
        return f"the sandbox needs Linux, and this is {sys.platform}"
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        return f"the sandbox knows no system calls of {machine}; known: {', '.join(ARCHITECTURES)}"
    libc = ctypes.CDLL(None, use_errno=True)
    number, size, flags = ctypes.c_long(CREATE_RULESET), ctypes.c_size_t(0), ctypes.c_uint32(VERSION_ONLY)
    if libc.syscall(number, None, size, flags) < 1:
        return (
            f"the kernel has no Landlock ({os.strerror(ctypes.get_errno())}); it needs Linux 5.13 or newer with "
            "landlock among the modules in /sys/kernel/security/lsm, and a container that lets it through"
        )
    return None


async def run_python(
    code: str,
    *,
    stdin: str = "",
    files: Mapping[str, str | bytes] | None = None,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    output_kb: int = 256,
    disk_mb: int = 64,
    allow_unprotected: bool = False,
) -> SandboxResult:
    """Run `code` as a script, in a new folder that holds `files` and is removed afterwards.

    Raises SandboxUnavailable where the code cannot be confined, unless `allow_unprotected`: then only limits hold.
    """
    reason = why_unprotected()
    if reason is not None and not allow_unprotected:
        raise SandboxUnavailable(f"{reason}. allow_unprotected runs the code all the same, with your rights")
    limits = Limits(timeout_s, memory_mb, output_kb, disk_mb)
    folder = Path(tempfile.mkdtemp(prefix="sandbox-")).resolve()
    try:
        main = folder / "main.py"
        for name, content in {**(files or {}), main.name: code}.items():
            _write(folder, name, content)
        is_protected = reason is None
        request = _request(folder, main, limits, protected=is_protected)
        return await _Run(folder, limits, is_protected).to_end(request, stdin)
    finally:
        await asyncio.to_thread(_remove, folder)


def _write(folder: Path, name: str, content: str | bytes) -> None:
    target = folder / name
    if not target.resolve().is_relative_to(folder) or target == folder:
        raise ValueError(f"the file {name!r} would lie outside the sandbox; give a relative path")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content if isinstance(content, bytes) else content.encode(errors="surrogatepass"))


def _request(folder: Path, main: Path, limits: Limits, *, protected: bool) -> dict[str, Any]:
    return {
        "parent": os.getpid(),
        "folder": str(folder),
        "main": str(main),
        "readable": readable_paths(),
        "writable": [path for path in DEVICES if Path(path).exists()],
        "filter": base64.b64encode(make_filter(os.uname().machine)).decode() if protected else None,
        "limits": limits.rlimits,
    }


@functools.cache
def readable_paths() -> list[str]:
    """Where Python's library, installed packages and shared libraries lie."""
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {sysconfig.get_path(name) for name in names}
    paths |= {sysconfig.get_path(name, vars={"base": sys.base_prefix}) for name in names}
    paths |= {sysconfig.get_config_var("LIBDIR"), *SYSTEM}
    return sorted({str(Path(path).resolve()) for path in paths if path and Path(path).exists()})


class _Run:
    """One process from its start to its end."""

    def __init__(self, folder: Path, limits: Limits, is_protected: bool) -> None:
        self.folder = folder
        self.limits = limits
        self.is_protected = is_protected
        self.stopped: str | None = None
        self._bytes_left = limits.output_kb << 10  # of both streams together

    async def to_end(self, request: dict[str, Any], stdin: str) -> SandboxResult:
        loop = asyncio.get_running_loop()
        transport, protocol = await loop.subprocess_exec(
            lambda: SubprocessStreamProtocol(limit=STREAM_BYTES, loop=loop),
            *(sys.executable, "-P", "-s", "-B", str(CHILD), json.dumps(request)),
            cwd=self.folder,
            env=_environment(self.folder),
            start_new_session=True,
        )
        process = Process(transport, protocol, loop)
        try:
            return await self._run(process, stdin)
        finally:
            self._kill(process)
            transport.close()
            await process.wait()

    async def _run(self, process: Process, stdin: str) -> SandboxResult:
        assert process.stdin and process.stdout and process.stderr
        await _ready(process.stderr)
        started = time.monotonic()
        stdout, stderr = bytearray(), bytearray()
        reading = asyncio.gather(self._read(process.stdout, stdout), self._read(process.stderr, stderr))
        ended = asyncio.gather(_feed(process.stdin, stdin), process.wait())
        try:
            await self._watch(process, ended, started + self.limits.timeout_s)
            wall_s = time.monotonic() - started
            self._kill(process)
            await asyncio.wait([reading, ended], timeout=DRAIN_S)  # what it left behind may keep its output open
        finally:
            for task in (reading, ended):
                task.cancel()
                await asyncio.wait([task])
        written = [output.decode(errors="replace") for output in (stdout, stderr)]
        assert process.returncode is not None, "killed, and still there"
        return SandboxResult(*written, exit_code=process.returncode, stopped=self.stopped, wall_s=wall_s)

    async def _read(self, stream: asyncio.StreamReader, output: bytearray) -> None:
        """What is written, up to the limit; the rest is thrown away until the process is gone."""
        while chunk := await stream.read(STREAM_BYTES):
            output += chunk[: max(self._bytes_left, 0)]
            self._bytes_left -= len(chunk)

    def _kill(self, process: Process) -> None:
        """Where nothing protects, the process may have children, which can be there when it has ended."""
        if process.returncode is None or not self.is_protected:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)

    async def _watch(self, process: Process, ended: asyncio.Future[Any], deadline: float) -> None:
        """Until the process has ended, or is over one of its limits."""
        while not ended.done() and self.stopped is None:
            left = deadline - time.monotonic()
            await asyncio.wait([ended], timeout=max(min(left, WATCH_S), 0))
            if self._bytes_left < 0:
                self.stopped = "output"
            elif ended.done() or process.returncode is not None:
                if _is_over(self.folder, None, self.limits.disk_mb << 20):  # since it was last looked at
                    self.stopped = "disk"
                return
            elif left <= 0:
                self.stopped = "time"
            elif _num_threads(process.pid) > MAX_THREADS:
                self.stopped = "threads"
            elif _is_over(self.folder, process.pid, self.limits.disk_mb << 20):
                self.stopped = "disk"


def _environment(folder: Path) -> dict[str, str]:
    """Nothing of ours, which may hold keys. The same hashes in every run; one thread for each numerical library."""
    return {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
        "PYTHONUTF8": "1",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }


async def _ready(stderr: asyncio.StreamReader) -> None:
    """Wait for the line with which the process says that it is confined, before any of the code runs."""
    said: list[str] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(STARTUP_S):
            while line := (await stderr.readline()).decode(errors="replace"):
                if line == f"{STATUS}ready\n":
                    return
                said.append(line.removeprefix(STATUS))
    raise SandboxUnavailable(f"the sandbox cannot be closed: {shorten(''.join(said).strip()) or 'nothing was said'}")


async def _feed(pipe: asyncio.StreamWriter, text: str) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # code need not read what it is given
        pipe.write(text.encode(errors="surrogatepass"))
        await pipe.drain()
    pipe.close()


def _num_threads(pid: int) -> int:
    try:
        found = THREADS.search(Path(f"/proc/{pid}/status").read_bytes())
    except OSError:
        return 0
    return int(found[1]) if found else 0


def _is_over(folder: Path, pid: int | None, max_bytes: int) -> bool:
    """Whether the files in `folder` and those removed but held open are too many, too large, or not to be looked at.
    Without a process, none are held open."""
    pending, num_files, size_bytes = [str(folder)], 0, 0 if pid is None else _removed_bytes(pid)
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    num_files += 1
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        size_bytes += _size_bytes(entry)
                    if num_files > MAX_FILES or size_bytes > max_bytes:
                        return True
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:  # a path that is too long, a folder without rights
            return True
    return size_bytes > max_bytes


def _size_bytes(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except FileNotFoundError:  # removed meanwhile
        return 0


def _removed_bytes(pid: int) -> int:
    """The size of files that no folder holds any more and the process does. They have no other place to be counted."""
    sizes: dict[tuple[int, int], int] = {}
    with suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # it may have ended
        for entry in entries:
            with suppress(OSError):  # closed meanwhile
                file = entry.stat()
                if file.st_nlink == 0:
                    sizes[file.st_dev, file.st_ino] = file.st_size
    return sum(sizes.values())


def _remove(folder: Path) -> None:
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # too deep, or without rights
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", str(folder)], check=False, capture_output=True)
