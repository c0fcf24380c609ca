"""Untrusted Python in a process of its own: no network, no files but its folder's, no other processes, bounded in all.

    run_python ─► a folder ─► sandbox_child.py: Landlock (files), seccomp (system calls), rlimits ─► the code
         └── watches time, output, threads and disk (sandbox_disk.py); kills the process, and removes the folder

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
import socket
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

from tandem.isolation.sandbox_child import CREATE_RULESET, STATUS, VERSION_ONLY
from tandem.isolation.sandbox_disk import is_over
from tandem.isolation.sandbox_tests import passes
from tandem.isolation.seccomp import ARCHITECTURES, make_filter
from tandem.utils.errors import shorten
from tandem.utils.keeper import END_SIGNAL, descendants
from tandem.utils.processes import kept, kill_all

CHILD = Path(__file__).with_name("sandbox_child.py")
STARTUP_S = 60.0
WATCH_S = 0.05
DRAIN_S = 5.0
STREAM_BYTES = 1 << 16
MAX_THREADS = 64
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
    passed: bool = False  # the tests that it was given

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
    tests: str | None = None,
    files: Mapping[str, str | bytes] | None = None,
    timeout_s: float = 10.0,
    memory_mb: int = 512,
    output_kb: int = 256,
    disk_mb: int = 64,
    allow_unprotected: bool = False,
) -> SandboxResult:
    """Run `code` as a script, in a new folder that holds `files` and is removed afterwards. `tests` are Python that is
    run in the same module when the code has ended, and passes where it does not raise (isolation/sandbox_tests.py).

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
        return await _Run(folder, limits, is_protected).to_end(request, stdin, tests)
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
        "parent": os.getpid() if protected else None,  # else it has a keeper
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

    async def to_end(self, request: dict[str, Any], stdin: str, tests: str | None) -> SandboxResult:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                channel = None if tests is None else theirs.fileno()
                request |= {"channel": channel}
                command = [sys.executable, "-P", "-s", "-B", str(CHILD), json.dumps(request)]
                transport, protocol = await loop.subprocess_exec(
                    lambda: SubprocessStreamProtocol(limit=STREAM_BYTES, loop=loop),
                    *(command if self.is_protected else kept(command)),
                    cwd=self.folder,
                    env=_environment(self.folder),
                    start_new_session=True,
                    pass_fds=[] if channel is None else [channel],
                )
            process = Process(transport, protocol, loop)
            try:
                return await self._run(process, stdin, tests, ours)
            finally:
                await self._end(process)
                transport.close()

    async def _run(self, process: Process, stdin: str, tests: str | None, channel: socket.socket) -> SandboxResult:
        assert process.stdin and process.stdout and process.stderr
        await _ready(process.stderr)
        started = time.monotonic()
        stdout, stderr = bytearray(), bytearray()
        reading = asyncio.gather(self._read(process.stdout, stdout), self._read(process.stderr, stderr))
        ended = asyncio.gather(_feed(process.stdin, stdin), process.wait())
        testing = asyncio.ensure_future(passes(channel, tests))
        try:
            await self._watch(process, ended, started + self.limits.timeout_s)
            wall_s = time.monotonic() - started
            await self._end(process)
            await asyncio.wait([reading, ended, testing], timeout=DRAIN_S)  # a daemon may keep its output open
        finally:
            for task in (reading, ended, testing):
                task.cancel()
                await asyncio.wait([task])
        assert process.returncode is not None, "killed, and still there"
        return SandboxResult(
            stdout.decode(errors="replace"),
            stderr.decode(errors="replace"),
            process.returncode,
            stopped=self.stopped,
            wall_s=wall_s,
            passed=not testing.cancelled() and testing.result(),
        )

    async def _read(self, stream: asyncio.StreamReader, output: bytearray) -> None:
        """What is written, up to the limit; the rest is thrown away until the process is gone."""
        while chunk := await stream.read(STREAM_BYTES):
            output += chunk[: max(self._bytes_left, 0)]
            self._bytes_left -= len(chunk)

    async def _end(self, process: Process) -> None:
        """Kill it. Where nothing protects, it may have started others, which its keeper kills."""
        if process.returncode is None and not self.is_protected:
            process.send_signal(END_SIGNAL)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), DRAIN_S)
        if process.returncode is None:
            kill_all(process.pid)
        await process.wait()

    async def _watch(self, process: Process, ended: asyncio.Future[Any], deadline: float) -> None:
        """Until the process has ended, or is over one of its limits."""
        while not ended.done() and self.stopped is None:
            left = deadline - time.monotonic()
            await asyncio.wait([ended], timeout=max(min(left, WATCH_S), 0))
            if self._bytes_left < 0:
                self.stopped = "output"
            elif ended.done() or process.returncode is not None:
                if is_over(self.folder, [], self.limits.disk_mb << 20):  # since it was last looked at
                    self.stopped = "disk"
                return
            elif left <= 0:
                self.stopped = "time"
            else:
                pids = [process.pid] if self.is_protected else descendants(process.pid)
                if sum(map(_num_threads, pids)) > MAX_THREADS:
                    self.stopped = "threads"
                elif is_over(self.folder, pids, self.limits.disk_mb << 20):
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


def _remove(folder: Path) -> None:
    with suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # too deep, or without rights
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], check=False, capture_output=True)
        subprocess.run(["rm", "-rf", str(folder)], check=False, capture_output=True)
