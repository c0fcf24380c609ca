"""The machine's C compiler: what it is called, which flags it takes, and that it never outlives us.

`library.py` has the kernels built here; nothing here knows what they compute.
"""

import contextlib
import ctypes
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TIMEOUT_S = 600
FLAGS = ["-O3", "-std=c11", "-fPIC", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"]
# Of each list the first that the compiler takes, and whose library then loads.
FOR_X86_64, FOR_OTHERS = [["-march=native"], []], [["-mcpu=native"], ["-march=native"], []]
FOR_THIS_PROCESSOR = FOR_X86_64 if platform.machine() == "x86_64" else FOR_OTHERS
# Apple's compiler takes OpenMP by the second; one whose OpenMP runtime is not PyTorch's gets vectors, but one thread.
OPENMP = [["-fopenmp"], ["-Xpreprocessor", "-fopenmp"], ["-fopenmp-simd"], []]
# Linked without an OpenMP runtime: PyTorch has brought one, and two of them would fight for cores.
LINK_FLAGS = ["-shared", *(["-Wl,-undefined,dynamic_lookup"] if sys.platform == "darwin" else [])]
PROBE = """
float probe(const float *x, int count) {
    float sum = 0.0f;
#pragma omp parallel for reduction(+ : sum)
    for (int i = 0; i < count; i++) sum += x[i];
    return sum;
}
"""
# A compiler is several processes, in a session of their own. If we are killed, our end of the pipe that is the
# shell's standard input closes, and the watcher ends them all; once the command is done, the watcher is ended.
WATCHED = """
exec 3<&0 </dev/null
(read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 &
"$@"
status=$?
exec 2>/dev/null
kill -KILL $!
wait $!
exit $status
"""


@dataclass(frozen=True)
class Compiler:
    command: list[str]
    flags: list[str]
    "Besides those that every compiler takes."

    @classmethod
    def find(cls) -> "Compiler | None":
        """What CC names, else the first of the usual names that is installed."""
        named = shlex.split(os.environ.get("CC", ""))
        for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
            program = shutil.which(command[0])
            if program is not None:
                return cls([program, *command[1:]], [])
        return None

    def version(self) -> str:
        return run(*self.command, "--version")

    def suited_to_this_machine(self, folder: Path) -> "Compiler":
        """With the best flags that work here, tried in this folder."""
        source = folder / "probe.c"
        source.write_text(PROBE)
        chosen = self
        for candidates in (FOR_THIS_PROCESSOR, OPENMP):
            chosen = chosen._with_first_that_works(candidates, source)
        return chosen

    def _with_first_that_works(self, candidates: Iterable[list[str]], source: Path) -> "Compiler":
        refusal: Exception | None = None
        for number, flags in enumerate(candidates):
            candidate = Compiler(self.command, [*self.flags, *flags])
            try:
                ctypes.CDLL(str(candidate.build(source, source.with_name(f"probe{len(self.flags)}-{number}.so"))))
                return candidate
            except (OSError, subprocess.CalledProcessError) as error:
                refusal = error
        assert refusal is not None
        raise refusal

    def build(self, source: Path, library: Path) -> Path:
        """A shared library from one file of C."""
        object_file = library.with_suffix(".o")
        run(*self.command, *FLAGS, *self.flags, "-c", "-o", str(object_file), str(source))
        run(*self.command, *LINK_FLAGS, "-o", str(library), str(object_file), "-lm")
        return library


def run(*command: str) -> str:
    """What a command prints; it and all its children end with us, however we end, or when time is up."""
    lifeline, held = os.pipe()
    with os.fdopen(lifeline), os.fdopen(held):
        process = subprocess.Popen(
            ["sh", "-c", WATCHED, "sh", *command],
            stdin=lifeline,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            printed, complaints = process.communicate(timeout=TIMEOUT_S)
        except BaseException:  # cleans up
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, command, printed, complaints)
    return printed
