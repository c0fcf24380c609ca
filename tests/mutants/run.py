"""Do the unit tests notice when the code is wrong? `make mutants` answers with figures.

Small mistakes are drawn at random from the sources (draw.py). Each is made in a copy of the sources and given to the
unit tests that mirror the file, that import it, or stand in the same folder; a mutant that they let pass has survived.
Not part of `make test`: 300 of them take about an hour on two cores.

    python -m tests.mutants.run                                      300, with a new seed, which is printed
    python -m tests.mutants.run --seed 7 --count 50                  the same again
    python -m tests.mutants.run trainer/losses loop                  in files whose path holds one of these words

Survivors are printed with file and line. Each is either a test to be written, or goes into equivalent.toml with the
reason why no test could notice it.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import Queue

from tests.mutants.draw import ROOT, Mutation, draw

from tandem.utils.processes import usable_cores

SOURCES = ROOT / "src"
REQUIRED_SHARE = 0.92
TIMEOUT_S = 600  # for all tests of one file, and those of its neighbours
BASELINE_TIMEOUT_S = 3600  # for all tests at once
TEST_TIMEOUT_S = 60  # a mutant that hangs one test is found out then
SURVIVED, KILLED = "SURVIVED", "killed"
NO_TESTS_RAN = (4, 5)  # pytest's exit codes for wrong arguments and for no tests; others a mutant may well cause
NO_END = -1  # in their place: the tests took too long
HANGS = "hangs"  # as good as killed, unless the machine has other work


class Workplace:
    """A copy of the sources that mutants are made in, one at a time, and the process that tests it."""

    def __init__(self, sources: Path) -> None:
        self.sources = sources
        environment = os.environ | {"PYTHONPATH": str(sources), "OMP_NUM_THREADS": "1"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # two versions of a file may be of one second and one size
        command = [sys.executable, "-m", "tests.mutants.worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.worker = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)

    def judge(
        self, tests: Sequence[str], timeout_s: float = TIMEOUT_S, test_timeout_s: float = TEST_TIMEOUT_S
    ) -> tuple[str, str]:
        """What the tests say of the sources as they are now: a verdict and the end of their output. A crash is a
        failure, too."""
        paths = [str(ROOT / "tests" / "unit" / test) for test in tests]
        quiet = ["-q", "--no-header", "-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        arguments = ["-x", f"--timeout={test_timeout_s}", *quiet, *paths]
        assert self.worker.stdin is not None and self.worker.stdout is not None
        print(json.dumps([arguments, timeout_s]), file=self.worker.stdin, flush=True)
        code, output = json.loads(self.worker.stdout.readline())
        return verdict_of(code, output), output

    def close(self) -> None:
        assert self.worker.stdin is not None
        self.worker.stdin.close()
        self.worker.wait()

    @contextmanager
    def mutated(self, mutant: Mutation) -> Iterator[None]:
        path = self.sources / "tandem" / mutant.file
        source = path.read_bytes()
        path.write_bytes(mutant.apply(source))
        try:
            yield
        finally:
            path.write_bytes(source)


def verdict_of(code: int, output: str) -> str:
    if code == NO_END or "Failed: Timeout" in output:
        return HANGS
    if code in NO_TESTS_RAN:
        raise RuntimeError(f"pytest ended with {code}: {output}")
    return KILLED if code else SURVIVED


def judge(mutant: Mutation, workplaces: "Queue[Workplace]") -> str:
    workplace = workplaces.get()
    try:
        with workplace.mutated(mutant):
            return workplace.judge(mutant.tests)[0]
    finally:
        workplaces.put(workplace)


def check_baseline(mutants: Sequence[Mutation], workplace: Workplace) -> None:
    """Tests that fail anyway would kill every mutant."""
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    verdict, output = workplace.judge(tests, BASELINE_TIMEOUT_S, BASELINE_TIMEOUT_S)
    if verdict != SURVIVED:
        raise SystemExit(f"{output}\nmutants: tests fail without a mutant")


def run(mutants: Sequence[Mutation], num_workers: int) -> list[Mutation]:
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
                print(f"{number:4d}/{len(mutants)} {verdict:8s} {mutant}", flush=True)
                if verdict == SURVIVED:
                    survivors.append(mutant)
        while not workplaces.empty():
            workplaces.get().close()
        return survivors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="take files whose path holds one of these")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    args = parser.parse_args()
    mutants = draw(args.count, args.seed, args.words)
    if not mutants:
        raise SystemExit(f"mutants: no file that mutants are made in has {' or '.join(args.words)} in its path")
    print(f"mutants: seed {args.seed}", flush=True)
    started = time.monotonic()
    survivors = run(mutants, num_workers=usable_cores())
    share = 1 - len(survivors) / len(mutants)
    for mutant in survivors:
        print(f"survived: {mutant}")
    minutes = (time.monotonic() - started) / 60
    print(f"{share:.1%} of {len(mutants)} mutants killed in {minutes:.0f} minutes (seed {args.seed})")
    if share < REQUIRED_SHARE:
        raise SystemExit(f"mutants: at least {REQUIRED_SHARE:.0%} have to be killed")


if __name__ == "__main__":
    main()
