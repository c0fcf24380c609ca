"""The compiler ends when we end, and a poor one still gives kernels."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pytest import MonkeyPatch

from tandem.models.cpu import compiler
from tandem.models.cpu.compiler import Compiler
from tandem.utils.waiting import Deadline, wait_for

# Like a compiler, it has another process do the work; both hold the pipe open.
SLOW = """#!/bin/sh
exec 9>"{pipe}"
echo started >&9
(sleep 100; echo finished >&9) &
wait
"""
# What cc is on some machines: no OpenMP, and not one flag for the processor.
POOR = """#!/bin/sh
for argument in "$@"; do
    case $argument in
        -fopenmp|-march=*|-mcpu=*) echo "unsupported option '$argument'" >&2; exit 1;;
    esac
done
exec {cc} "$@"
"""


def write_script(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


class Pipe:
    """What the slow compiler's processes have written so far, and whether any of them is alive."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.written = b""

    def has(self, text: bytes) -> bool:
        self.read()
        return text in self.written

    def is_closed(self) -> bool:
        return self.read() == b""

    def read(self) -> bytes | None:
        """None: nothing new, but there are processes that could write."""
        try:
            data = os.read(self.descriptor, 4096)
        except BlockingIOError:
            return None
        self.written += data
        return data


def eventually(condition: Callable[[], bool], what: str) -> None:
    wait_for(lambda: condition() or None, Deadline(what, 60, "it never came"))


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(tmp_path / "pipe")
    yield pipe
    os.close(pipe.descriptor)


@pytest.fixture
def slow(tmp_path: Path, pipe: Pipe) -> Path:
    return write_script(tmp_path / "cc", SLOW.format(pipe=tmp_path / "pipe"))


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_whoever_is_killed_while_compiling_leaves_no_compiler_behind(signum: int, slow: Path, pipe: Pipe) -> None:
    # Tests that run in the background of a shell ignore SIGINT, and so would what they start.
    listen = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = f"{listen}; from tandem.models.cpu import compiler; compiler.run({str(slow)!r})"
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    eventually(lambda: pipe.has(b"started"), "the compiler")
    process.send_signal(signum)
    assert process.wait() != 0
    eventually(pipe.is_closed, "the end of the compiler and its child")
    assert pipe.written == b"started\n"


def test_a_compiler_that_takes_too_long_is_ended_with_its_children(
    slow: Path, pipe: Pipe, monkeypatch: MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "TIMEOUT_S", 5)
    with pytest.raises(subprocess.TimeoutExpired):
        compiler.run(str(slow))
    eventually(pipe.is_closed, "the end of the compiler and its child")
    assert pipe.written == b"started\n"


def test_what_a_command_says_and_how_it_fails() -> None:
    assert compiler.run("sh", "-c", "echo said") == "said\n"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        compiler.run("sh", "-c", "echo why >&2; exit 3")
    assert (caught.value.returncode, caught.value.stderr) == (3, "why\n")


def test_a_command_that_is_done_leaves_nothing_of_its_session() -> None:
    session = int(compiler.run("sh", "-c", "echo $PPID"))
    with pytest.raises(ProcessLookupError):
        os.killpg(session, 0)


def test_a_compiler_that_refuses_flags_is_used_without_them(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    found = Compiler.find()
    if found is None:
        pytest.skip("no C compiler")
    poor = write_script(tmp_path / "poor", POOR.format(cc=found.command[0]))
    monkeypatch.setenv("CC", f"{poor} -DUNUSED")
    suited = (Compiler.find() or found).suited_to_this_machine(tmp_path)
    assert suited.command == [str(poor), "-DUNUSED"]
    assert suited.flags == ["-fopenmp-simd"]


def test_an_openmp_whose_runtime_is_missing_is_done_without(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """As with clang, whose OpenMP is not the one that PyTorch brings: it compiles, but the library does not load."""
    found = Compiler.find()
    if found is None:
        pytest.skip("no C compiler")
    calls_a_runtime = "-Dprobe=runtime(void); float started(void) { return runtime(); } float probe"
    monkeypatch.setattr(compiler, "OPENMP", [[calls_a_runtime], ["-fopenmp-simd"]])
    assert found.suited_to_this_machine(tmp_path).flags[-1] == "-fopenmp-simd"


def test_usual_names_are_tried_in_order(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Compiler.find() is None
    for name in ("clang", "gcc", "cc"):
        write_script(tmp_path / name, "#!/bin/sh\n")
        assert Compiler.find() == Compiler([str(tmp_path / name)], [])
