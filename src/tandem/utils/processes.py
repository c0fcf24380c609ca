"""Small process matters every entrypoint shares."""

import atexit
import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FunctionType
from typing import Any, NoReturn

from tandem.utils import keeper
from tandem.utils.errors import BrokenRunDirectory, Diverged, OutOfMemory, UserError, is_unwritable, shorten_lines
from tandem.utils.keeper import descendants, stat_fields
from tandem.utils.log import make_errors_printable, say, write_what_the_terminal_can

SUPERVISOR_PID = "TANDEM_SUPERVISOR_PID"
# Exit codes of what starting again does not mend: a user's mistake, and a disk that is full or a directory that broke.
REFUSED, UNUSABLE = 2, 3
PR_SET_PDEATHSIG = 1
# Schedulers send a signal to all processes of a job, and parents pass it on: within this time it is one.
REPEATED_WITHIN_S = 1.0
# As they are installed.
COMMANDS = (
    *("rl", "inference", "orchestrator", "trainer", "sft", "align", "sweep", "reward-server", "evaluate", "eval"),
    "export-model",
)


class Terminated(KeyboardInterrupt):
    """SIGTERM, treated as Ctrl-C is: whoever cleans up for the one does so for the other."""


class Stopped(Exception):
    """A process was asked to end, and did so in order. The exit code is 128 + the signal."""

    def __init__(self, signal_number: int, message: str) -> None:
        super().__init__(message)
        self.signal_number = signal_number

    @classmethod
    def by(cls, interrupt: KeyboardInterrupt) -> "Stopped":
        if isinstance(interrupt, Terminated):
            return cls(signal.SIGTERM, "stopped by SIGTERM")
        return cls(signal.SIGINT, "stopped by Ctrl-C")


def die_with_supervisor() -> None:
    """Started by a supervisor that is killed, this process is ended by the kernel: no orphans. Linux only."""
    supervisor = os.environ.get(SUPERVISOR_PID)
    if supervisor is not None and not die_with_parent(int(supervisor)):
        raise SystemExit("the supervisor is gone")


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> bool:
    """However the process `parent` ends, this one gets a signal and ends with it. False if it is not our parent, or no
    longer.

    Linux only; elsewhere nothing is promised.
    """
    if not sys.platform.startswith("linux"):
        return True
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def kept(command: Sequence[str]) -> list[str]:
    """The command under a keeper (utils/keeper.py): what it starts ends when it ends, and all of it with this process.
    On Linux, "with this process" means with the thread that starts it."""
    return [sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), *command]


def kill_tree(process: subprocess.Popen[Any]) -> None:
    """Kill a process that is `kept`, with all that it started, and wait for its end."""
    if process.poll() is None:
        process.send_signal(keeper.END_SIGNAL)
        try:
            process.wait(keeper.SWEEP_S + 1)
        except subprocess.TimeoutExpired:  # somebody has stopped the keeper
            kill_all(process.pid)
            process.wait()


def kill_all(pid: int) -> None:
    """A process and whatever is below it now."""
    for each in (*descendants(pid), pid):
        with suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


def process_state(pid: int) -> str | None:
    """One letter as `ps` shows it (R, S, T, Z, …); None where there is no such process, or no /proc."""
    fields = stat_fields(pid)
    return fields[0] if fields else None


def start_time(pid: int) -> int | None:
    """When a process was started, in ticks since boot: with the pid, it names a process for good."""
    fields = stat_fields(pid)
    return int(fields[19]) if fields else None


def process_exists(pid: int) -> bool:
    """Also where another user's processes are hidden."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def usable_cores() -> int:
    """That this process may run on. macOS tells only how many there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_exit(code: int) -> str:
    """How a process ended, by what `subprocess` says of it."""
    if code == -signal.SIGKILL:
        return "signal SIGKILL, most likely from the kernel because memory ran out (`dmesg` tells)"
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def is_first_rank() -> bool:
    """Of the processes that torchrun started, the one that writes what is there once; true without torchrun."""
    return os.environ.get("RANK", "0") == "0"


def begin_command() -> None:
    """Called before a command imports anything else, and does nothing in a program that imports a command.

    Until `run_entrypoint`, Ctrl-C ends the process with one line. A closed terminal (SIGHUP) asks a command to end as
    SIGTERM does, unless `nohup` has it ignored.
    """
    command = Path(sys.argv[0]).name
    if command != "-m" and command not in COMMANDS:  # Python's own word while it looks for the module
        return
    write_what_the_terminal_can()
    make_errors_printable()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _leave)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))


def _leave(number: int, _frame: object) -> NoReturn:
    """Nothing has been started yet, and an exception in the middle of an import may be taken for another one."""
    say("stopped by Ctrl-C", error=True)
    os._exit(128 + number)


@contextmanager
def cleaning_up_on_sigterm() -> Iterator[None]:
    """What is entered inside is left in order; until somebody takes the signal over, such as the supervisor. Not in a
    process that others have started and end: they would not wait."""
    is_others = SUPERVISOR_PID in os.environ or "RANK" in os.environ
    is_main = threading.current_thread() is threading.main_thread()
    if is_others or not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def terminate(_number: int, _frame: object) -> NoReturn:
        signal.signal(signal.SIGTERM, lambda *_: None)  # repeated, it would cut the clean-up short
        raise Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def run_entrypoint(name: str, body: Callable[[], None]) -> None:
    """Run a process's main part and give its end an exit code; whatever an error says, it stays readable.

    2: a user's mistake, in one line. 3: the disk does not take what is written, or the run directory broke.
    128 + signal: asked to end. 1: anything else.
    """
    die_with_supervisor()
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with cleaning_up_on_sigterm():
            body()
    except UserError as error:
        _exit(f"{name}: {error}", REFUSED)
    except BrokenRunDirectory as error:
        _exit(f"{name}: {error}", UNUSABLE)
    except Stopped as stopped:
        _exit(f"{name}: {stopped}", 128 + stopped.signal_number)
    except KeyboardInterrupt as interrupt:
        stopped = Stopped.by(interrupt)
        _exit(f"{name}: {stopped}", 128 + stopped.signal_number)
    except Exception as error:  # answers, by an exit code
        is_disk = is_unwritable(error)
        in_one_line = isinstance(error, Diverged | OutOfMemory) or is_torch_out_of_memory(error) or is_disk
        _exit(f"{name}: {error}" if in_one_line else traceback.format_exc(), UNUSABLE if is_disk else 1)
    finally:
        gc.unfreeze()  # where Python takes the modules apart, libraries say which of their objects it did not find


def is_torch_out_of_memory(error: Exception) -> bool:
    """Without importing torch."""
    return type(error).__name__ == "OutOfMemoryError" and type(error).__module__.partition(".")[0] == "torch"


def _exit(message: str, code: int) -> NoReturn:
    say(shorten_lines(message), error=True)
    raise SystemExit(code) from None


def run_process(main: FunctionType) -> None:
    """Call the `main` of the module that this process was started with.

    At its end Python takes every module apart, which takes half a second where torch was imported, and the memory goes
    back to the kernel all the same. So the process leaves as those of multiprocessing do: threads and exit functions
    come first, the modules stay. An error that is none of ours ends it as Python ends. Where another program runs the
    module (`runpy.run_module`), that goes on after it.
    """
    if main.__globals__ is not vars(sys.modules["__main__"]):
        main()
        return
    code: Any = 0
    try:
        main()
    except SystemExit as leaving:
        code = leaving.code or 0
    if not isinstance(code, int):  # a last word
        raise SystemExit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # of which Python tells
        raise SystemExit(code) from None
    os._exit(code)
