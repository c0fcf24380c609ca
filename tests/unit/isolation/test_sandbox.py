"""Code that tries to get out, to use everything up, or to stay: each attempt fails, and only it."""

import asyncio
import os
import signal
import subprocess
import sys
import sysconfig
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.isolation import sandbox
from tandem.isolation.sandbox import SandboxResult, SandboxUnavailable, run_python, why_unprotected
from tandem.utils.processes import descendants, process_exists

REASON = why_unprotected()
needs_kernel = pytest.mark.skipif(REASON is not None, reason=str(REASON))
pytestmark = needs_kernel
SECRET = "sesame-1729"


def run(code: str, **options: Any) -> SandboxResult:
    options.setdefault("timeout_s", 60.0)
    return asyncio.run(run_python(textwrap.dedent(code), **options))


def refused(result: SandboxResult, error: str = "PermissionError") -> bool:
    return result.exit_code == 1 and error in result.stderr.splitlines()[-1]


def test_code_runs_with_input_files_and_the_standard_library() -> None:
    result = run(
        """
        import asyncio, collections, datetime, decimal, json, math, random, re, sqlite3, statistics, threading
        import helper
        async def later():
            await asyncio.sleep(0.001)
            return helper.double(int(input()))
        thread = threading.Thread(target=print, args=("thread",))
        thread.start()
        thread.join()
        print(asyncio.run(later()), json.load(open("data/in.json")))
        """,
        stdin="21\n",
        files={"helper.py": "def double(x):\n    return 2 * x\n", "data/in.json": b'{"a": 1}'},
    )
    assert (result.stdout, result.stderr, result.exit_code) == ("thread\n42 {'a': 1}\n", "", 0)
    assert result.succeeded and not result.timed_out


def test_own_folder_is_writable_and_gone_afterwards() -> None:
    result = run(
        """
        import os, pathlib, shutil, tempfile
        pathlib.Path("a").write_text("one")
        os.makedirs("b/c"); os.rename("a", "b/c/d"); os.symlink("b/c/d", "e")
        with open("e", "r+") as file:
            file.truncate(2)
        inside = [pathlib.Path.home(), pathlib.Path(tempfile.mkdtemp()).parent]
        print(open("e").read(), inside == [pathlib.Path.cwd()] * 2)
        shutil.rmtree("b")
        print(os.getcwd())
        """
    )
    said, folder = result.stdout.splitlines()
    assert (said, result.stderr) == ("on True", "")
    assert not Path(folder).exists()


def test_exceptions_and_exit_codes_are_told() -> None:
    assert run("import sys; sys.exit(5)").exit_code == 5
    broken = run("x = 1\nraise ValueError('no')")
    assert broken.exit_code == 1 and not broken.succeeded
    assert broken.stderr.startswith('Traceback (most recent call last):\n  File "main.py", line 2, in <module>\n')
    assert broken.stderr.endswith("ValueError: no\n")
    assert "SyntaxError" in run("def (").stderr


@pytest.mark.parametrize("path", ["/etc/passwd", "/etc/hosts", "/proc/self/environ", "/proc/1/cmdline", "/dev/tty"])
def test_system_files_are_not_read(path: str) -> None:
    assert refused(run(f"print(open({path!r}, 'rb').read())"))


def test_files_of_the_user_are_neither_read_listed_nor_written(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(SECRET)
    target = str(tmp_path / "metrics.jsonl")
    source = Path(sandbox.__file__).parent
    outside = {"home": Path.home(), "source": source, "run": tmp_path}
    if source.is_relative_to(sysconfig.get_path("purelib")):  # packages of the environment may be imported, so may ours
        del outside["source"]
    for folder in map(str, outside.values()):
        assert refused(run(f"import os; print(os.listdir({folder!r}))")), folder
    assert refused(run(f"print(open({target!r}).read())"))
    assert refused(run(f"open({target!r}, 'w')"))
    assert refused(run(f"open({str(tmp_path / 'new')!r}, 'w')"))
    assert refused(run(f"import os; os.remove({target!r})"))
    assert refused(run(f"import os; os.mkdir({str(tmp_path / 'folder')!r})"))
    assert refused(run(f"import os; os.truncate({target!r}, 0)"))
    assert refused(run(f"import os; os.chmod({target!r}, 0o777)"))
    assert refused(run(f"import os; os.utime({target!r}, (0, 0))"))
    assert refused(run(f"import os; os.symlink({target!r}, 'link'); print(open('link').read())"))
    assert run(f"import os; os.link({target!r}, 'link')").exit_code == 1
    assert run(f"import os; os.rename({target!r}, 'mine')").exit_code == 1
    climbing = run("import os\nos.chdir('/')\nprint(os.listdir('.'))")
    assert refused(climbing)
    assert (tmp_path / "metrics.jsonl").read_text() == SECRET
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_file_of_the_library_is_not_cut_off() -> None:
    result = run("import os, json; os.open(json.__file__, os.O_RDONLY | os.O_TRUNC)")
    assert refused(result)
    assert refused(run("import json; open(json.__file__, 'a')"))


@pytest.mark.parametrize(
    "code",
    [
        "socket.socket(socket.AF_INET, socket.SOCK_STREAM)",
        "socket.socket(socket.AF_INET, socket.SOCK_DGRAM)",
        "socket.socket(socket.AF_INET6)",
        "socket.socket(socket.AF_UNIX)",
        "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
        "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
        "socket.create_connection(('127.0.0.1', 22))",
    ],
)
def test_there_is_no_network(code: str) -> None:
    assert refused(run(f"import socket; {code}"))


@pytest.mark.parametrize(
    "code",
    [
        "os.fork()",
        "os.posix_spawn('/bin/true', ['true'], {})",
        "os.execv('/bin/true', ['true'])",
        "import subprocess; subprocess.run(['true'])",
        "import multiprocessing; multiprocessing.get_context('fork').Process(target=print).start()",
        "os.setsid()",
        "import ctypes; ctypes.set_errno(0); libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.fork() < 0: raise PermissionError",
    ],
)
def test_no_process_is_started(code: str) -> None:
    assert refused(run(f"import os; {code}"))


def test_a_fork_bomb_leaves_one_process() -> None:
    code = """
    import os
    for _ in range(1000):
        try:
            os.fork()
        except PermissionError:
            pass
    print("one")
    """
    assert run(code).stdout == "one\n"


def test_other_processes_are_not_reached() -> None:
    for code in (
        "os.kill(os.getppid(), 9)",
        "os.kill(-1, 9)",
        "os.killpg(os.getpgid(os.getppid()), 15)",
        "import signal; signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 9)",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "import fcntl; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "print(open(f'/proc/{os.getppid()}/environ').read())",
        "print(open(f'/proc/{os.getppid()}/mem', 'rb').read(1))",
        "print(os.listdir(f'/proc/{os.getppid()}/fd'))",
    ):
        assert refused(run(f"import os; {code}")), code
    assert run("import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))").exit_code == 1
    assert run("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))").exit_code == 1


def test_the_environment_is_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", SECRET)
    monkeypatch.setenv("PYTHONSTARTUP", SECRET)
    result = run("import os; print(dict(os.environ))")
    assert result.succeeded and SECRET not in result.stdout


def test_only_the_three_streams_are_open() -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        result = run(
            """
            import os
            def is_open(number):
                try:
                    return bool(os.fstat(number))
                except OSError:
                    return False
            print([number for number in range(200) if is_open(number)])
            """
        )
    finally:
        os.close(read)
        os.close(write)
    assert result.stdout == "[0, 1, 2]\n"


def test_endless_code_ends_at_its_time() -> None:
    for code in ("while True: pass", "import time; time.sleep(3600)", "import threading; threading.Event().wait()"):
        result = run(code, timeout_s=0.5)
        assert result.timed_out and not result.succeeded and result.exit_code < 0
        assert result.wall_s >= 0.5


def test_code_that_ignores_signals_ends_too() -> None:
    code = """
    import signal
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    print("ignoring", flush=True)
    while True: pass
    """
    result = run(code, timeout_s=0.5)
    assert (result.stdout, result.timed_out) == ("ignoring\n", True)


def test_memory_is_bounded() -> None:
    result = run("x = bytearray(2 << 30)", memory_mb=256)
    assert refused(result, "MemoryError")
    grown = run("x = []\nwhile True: x.append(bytearray(1 << 20))", memory_mb=256)
    assert refused(grown, "MemoryError")
    assert run("import os; os.memfd_create('x')").exit_code == 1


def test_output_is_bounded() -> None:
    result = run("while True: print('x' * 1000)", output_kb=16)
    assert result.stopped == "output" and not result.succeeded
    assert 15_000 < len(result.stdout) <= 16 << 10
    both = run("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", output_kb=16)
    assert both.stopped == "output" and len(both.stderr) <= 16 << 10


def test_threads_are_bounded() -> None:
    code = """
    import threading
    threading.stack_size(32768)
    while True: threading.Thread(target=threading.Event().wait).start()
    """
    assert run(code).stopped == "threads"


@pytest.mark.parametrize("name", ["Threads: 1", "\rThreads:\t1", "\nThreads:\t1", "Threads: x", "Threads:"])
def test_code_that_calls_itself_threads_has_no_more_of_them(name: str) -> None:
    code = f"""
    import ctypes, threading, time
    assert ctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0) == 0
    time.sleep(0.3)
    threading.stack_size(32768)
    while True: threading.Thread(target=threading.Event().wait).start()
    """
    assert run(code).stopped == "threads"


def test_disk_is_bounded() -> None:
    many = "n = 0\nwhile True:\n    open(f'file{n}', 'w').write('x' * 100_000); n += 1"
    assert run(many, disk_mb=8).stopped == "disk"
    empty = "n = 0\nwhile True:\n    open(f'file{n}', 'w'); n += 1"
    assert run(empty).stopped == "disk"
    one = run("open('large', 'wb').write(bytes(100 << 20))", disk_mb=8, memory_mb=1024)
    assert not one.succeeded


def test_disk_is_counted_again_when_the_code_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may write many files, none too large, and end before it is looked at."""
    monkeypatch.setattr(sandbox, "WATCH_S", 60.0)
    code = "for n in range(3):\n    open(f'file{n}', 'wb').write(bytes(4 << 20))"
    ended = run(code, disk_mb=8)
    assert (ended.exit_code, ended.stopped, ended.succeeded) == (0, "disk", False)
    assert run(code, disk_mb=13).succeeded


TAKEN = """
import ctypes, mmap, os, socket, threading, time
def taken(number):
    file = open(f"file{number}", "w+b", buffering=0)
    file.write(bytes(2 << 20))
    os.remove(f"file{number}")
    return file
"""


@pytest.mark.parametrize(
    "code",
    [
        "files = [taken(n) for n in range(9)]",
        # Mapped by one page and closed: the mmap module would keep a descriptor.
        "call = ctypes.CDLL(None).mmap; call.argtypes = [ctypes.c_long] * 6; call.restype = ctypes.c_long\n"
        "for n in range(9): file = taken(n); assert call(0, 4096, 1, mmap.MAP_PRIVATE, file.fileno(), 0) > 0; del file",
        # The first thread ends, and another goes on.
        "def go_on(): time.sleep(0.2); files = [taken(n) for n in range(9)]; time.sleep(60)\n"
        "threading.Thread(target=go_on).start()\n"
        "ctypes.CDLL(None).syscall({'x86_64': 60, 'aarch64': 93}[os.uname().machine], 0)",
    ],
    ids=["open", "mapped", "another-thread"],
)
def test_files_that_are_removed_and_still_held_take_disk(code: str) -> None:
    assert run(f"{TAKEN}\n{code}\ntime.sleep(60)", disk_mb=8).stopped == "disk"


def test_files_that_are_held_twice_or_no_more_take_disk_once() -> None:
    assert run(f"{TAKEN}\nfor n in range(9): taken(n).close()\ntime.sleep(0.3)", disk_mb=8).succeeded
    twice = "file = taken(0); copies = [os.dup(file.fileno()) for _ in range(20)]; memory = mmap.mmap(file.fileno(), 0)"
    assert run(f"{TAKEN}\n{twice}\ntime.sleep(0.3)", disk_mb=8).succeeded


@pytest.mark.parametrize(
    "code",
    [
        "os.posix_fallocate(file.fileno(), 0, 1 << 20)",
        "ours, theirs = socket.socketpair(); socket.send_fds(ours, [b'x'], [file.fileno()])",
        # A table of descriptors that this thread alone has, and nobody sees: CLOSE_RANGE_UNSHARE.
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "if libc.syscall(436, 100, 101, 2) < 0: raise OSError(ctypes.get_errno(), 'close_range')",
    ],
)
def test_what_takes_disk_unseen_is_refused(code: str) -> None:
    assert refused(run(f"{TAKEN}\nfile = taken(0)\n{code}"))


def test_what_it_leaves_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    run("import os\nfor _ in range(3000):\n    os.mkdir('x'); os.chdir('x')")
    run("import os\nos.mkdir('shut', 0)")
    assert list(tmp_path.iterdir()) == []


def test_input_that_is_not_read_holds_nothing_up() -> None:
    assert run("print('done')", stdin="x" * 10_000_000).stdout == "done\n"
    assert run("import sys; print(len(sys.stdin.read()))", stdin="x" * 1_000_000).stdout == "1000000\n"


def test_output_that_is_no_text_and_input_of_half_a_character() -> None:
    assert run("import sys; sys.stdout.buffer.write(b'\\xff\\n')").stdout == "\ufffd\n"
    assert run("print('\ud800')").exit_code != 0


def test_files_stay_inside() -> None:
    for name in ("../x", "/tmp/x", "a/../../x", "."):
        with pytest.raises(ValueError, match="outside the sandbox"):
            run("", files={name: "x"})


def test_a_cancelled_run_ends_its_process() -> None:
    async def cancelled() -> list[int]:
        running = asyncio.ensure_future(run_python("import time; time.sleep(3600)", timeout_s=3600))
        while not (started := descendants(os.getpid())):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return started

    for pid in asyncio.run(cancelled()):
        wait_until_gone(pid)


def test_it_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = tmp_path / "start.py"
    script.write_text(
        "import asyncio\nfrom tandem.isolation.sandbox import run_python\n"
        "asyncio.run(run_python('import time; time.sleep(3600)', timeout_s=3600))\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], env={**os.environ, "TMPDIR": str(tmp_path)})
    while not (children := descendants(parent.pid)):
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    for pid in children:
        wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while process_exists(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_many_run_at_once() -> None:
    async def run_all() -> list[SandboxResult]:
        return await asyncio.gather(*(run_python(f"print({n} ** 2)", timeout_s=60) for n in range(20)))

    assert [result.stdout for result in asyncio.run(run_all())] == [f"{n**2}\n" for n in range(20)]


def test_without_protection_nothing_runs_unless_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "why_unprotected", lambda: "the kernel has no Landlock")
    proof = tmp_path / "ran"
    with pytest.raises(SandboxUnavailable, match=r"no Landlock.*allow_unprotected"):
        run(f"open({str(proof)!r}, 'w')")
    assert not proof.exists()
    assert run(f"open({str(proof)!r}, 'w'); print('ran')", allow_unprotected=True).stdout == "ran\n"
    assert proof.exists()


DAEMON = """
import os, signal
reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.write(writer, str(os.getpid()).encode())
        os.execve("/bin/sleep", ["sleep", "1000"], {})
    os._exit(0)
print(os.read(reader, 100).decode(), flush=True)
"""


@pytest.fixture
def unprotected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "why_unprotected", lambda: "the kernel has no Landlock")


@pytest.mark.usefixtures("unprotected")
@pytest.mark.parametrize(
    ("then", "how"),
    [
        ("", (0, None)),
        ("os.kill(os.getpid(), signal.SIGSEGV)", (-signal.SIGSEGV, None)),
        ("signal.pause()", (-signal.SIGKILL, "time")),
    ],
)
def test_a_daemon_ends_with_unprotected_code(then: str, how: tuple[int, str | None]) -> None:
    result = run(DAEMON + then, allow_unprotected=True, timeout_s=3.0 if how[1] else 60.0)
    assert (result.exit_code, result.stopped) == how
    assert not process_exists(int(result.stdout))


@pytest.mark.usefixtures("unprotected")
def test_processes_of_unprotected_code_count_as_threads_and_what_they_hold_as_disk() -> None:
    many = "import os, time\nfor _ in range(100):\n    if os.fork() == 0: time.sleep(60)\ntime.sleep(60)"
    assert run(many, allow_unprotected=True).stopped == "threads"
    held = f"{TAKEN}\nif os.fork() == 0: files = [taken(n) for n in range(9)]\ntime.sleep(60)"
    assert run(held, allow_unprotected=True, disk_mb=8).stopped == "disk"


@pytest.mark.usefixtures("unprotected")
def test_unprotected_code_is_tested_too() -> None:
    assert run("x = 1", tests="assert x == 1", allow_unprotected=True).passed
    assert not run("x = 1", tests="assert x == 2", allow_unprotected=True).passed


def test_a_kernel_that_refuses_a_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "make_filter", lambda machine: b"\x00" * 8)
    with pytest.raises(SandboxUnavailable, match="seccomp: Invalid argument"):
        run("print('ran')")
