"""Do the unit tests notice when the code is wrong? `make mutants` answers with figures.

mutants.toml lists small mistakes: a piece of source text and what it is replaced by. Each is made in a copy of the
sources and given to the unit tests named beside it; a mutant that they let pass has survived. Not part of `make test`:
it takes about a quarter of an hour on two cores. `test_list.py` is part of it, and checks that the list fits the
sources.

    python -m tests.mutants.run                       all of them
    python -m tests.mutants.run trainer/losses loop   those of files whose path holds one of these words
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

from tandem.utils.processes import usable_cores

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
LIST = Path(__file__).with_name("mutants.toml")
REQUIRED_SHARE = 0.95
TIMEOUT_S = 90
BASELINE_TIMEOUT_S = 900  # for all tests at once
TEST_TIMEOUT_S = 30  # a mutant that hangs one test is found out then
# pytest's exit codes: a failed test, or an error while collecting, which a mutant may well cause.
VERDICTS = {0: "SURVIVED", 1: "killed", 2: "killed"}
NO_END = -1  # in their place: the tests took too long
HANGS = "hangs"  # as good as killed, unless the machine has other work


@dataclass(frozen=True)
class Mutant:
    file: str  # below src/tandem
    tests: tuple[str, ...]  # below tests/unit
    original: str
    replacement: str

    @property
    def path(self) -> Path:
        return Path("tandem") / self.file

    def apply(self, source: str) -> str:
        """The source with the mistake in it."""
        found = source.count(self.original)
        if found != 1:
            raise ValueError(f"{self.file} holds {self.original!r} {found} times; a mutant has to be in one place")
        return source.replace(self.original, self.replacement)


def read_list() -> list[Mutant]:
    entries = tomllib.loads(LIST.read_text())["file"]
    return [
        Mutant(entry["path"], tuple(entry["tests"]), original, replacement)
        for entry in entries
        for original, replacement in entry["mutants"]
    ]


class Workplace:
    """A copy of the sources that mutants are made in, one at a time, and the process that tests it."""

    def __init__(self, sources: Path) -> None:
        self.sources = sources
        environment = os.environ | {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # two versions of a file may be of one second and one size
        command = [sys.executable, "-m", "tests.mutants.worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.worker = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def judge(self, tests: Sequence[str], timeout_s: float = TIMEOUT_S) -> tuple[str, str]:
        """What the tests say of the sources as they are now: a verdict and the end of their output. A crash is a
        failure, too."""
        paths = [str(ROOT / "tests" / "unit" / test) for test in tests]
        quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        arguments = ["-x", f"--timeout={TEST_TIMEOUT_S}", *quiet, *paths]
        assert self.worker.stdin is not None and self.worker.stdout is not None
        print(json.dumps([arguments, timeout_s]), file=self.worker.stdin, flush=True)
        code, output = json.loads(self.worker.stdout.readline())
        if code == NO_END or "Failed: Timeout" in output:
            return HANGS, output
        if code >= 0 and code not in VERDICTS:
            raise RuntimeError(f"pytest {' '.join(tests)} ended with {code}: {output}")
        return VERDICTS.get(code, "killed"), output

    def close(self) -> None:
        assert self.worker.stdin is not None
        self.worker.stdin.close()
        self.worker.wait()

    @contextmanager
    def mutated(self, mutant: Mutant) -> Iterator[None]:
        path = self.sources / mutant.path
        source = path.read_text()
        path.write_text(mutant.apply(source))
        try:
            yield
        finally:
            path.write_text(source)


def judge(mutant: Mutant, workplaces: "Queue[Workplace]") -> str:
    workplace = workplaces.get()
    try:
        with workplace.mutated(mutant):
            return workplace.judge(mutant.tests)[0]
    finally:
        workplaces.put(workplace)


def check_baseline(mutants: Sequence[Mutant], workplace: Workplace) -> None:
    """Tests that fail anyway would kill every mutant."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    verdict, output = workplace.judge(tests, BASELINE_TIMEOUT_S)
    if verdict != VERDICTS[0]:
        raise SystemExit(f"{output}\nmutants: tests fail without a mutant")


def run(mutants: Sequence[Mutant], num_workers: int) -> list[Mutant]:
    """The mutants that survive."""
    with tempfile.TemporaryDirectory(prefix="tandem-mutants-") as folder:
        workplaces: Queue[Workplace] = Queue()
        for number in range(num_workers):
            sources = Path(folder) / str(number)
            shutil.copytree(SOURCES, sources, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            workplaces.put(Workplace(sources))
        check_baseline(mutants, workplaces.queue[0])
        survivors = []
        with ThreadPoolExecutor(num_workers) as pool:
            outcomes = pool.map(lambda mutant: judge(mutant, workplaces), mutants)
            for number, (mutant, verdict) in enumerate(zip(mutants, outcomes, strict=True), start=1):
                print(f"{number:4d}/{len(mutants)} {verdict:8s} {mutant.file}: {mutant.original!r}", flush=True)
                if verdict == VERDICTS[0]:
                    survivors.append(mutant)
        while not workplaces.empty():
            workplaces.get().close()
        return survivors


def main(words: Sequence[str]) -> None:
    mutants = [mutant for mutant in read_list() if not words or any(word in mutant.file for word in words)]
    if not mutants:
        raise SystemExit(f"mutants: no file in {LIST.name} has {' or '.join(words)} in its path")
    started = time.monotonic()
    survivors = run(mutants, num_workers=usable_cores())
    share = 1 - len(survivors) / len(mutants)
    for mutant in survivors:
        print(f"survived: {mutant.file}: {mutant.original!r} -> {mutant.replacement!r} ({' '.join(mutant.tests)})")
    print(f"{share:.1%} of {len(mutants)} mutants killed in {(time.monotonic() - started) / 60:.0f} minutes")
    if share < REQUIRED_SHARE:
        raise SystemExit(f"mutants: at least {REQUIRED_SHARE:.0%} have to be killed")


if __name__ == "__main__":
    main(sys.argv[1:])
