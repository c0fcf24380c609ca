"""Runs tests in the sandbox when the program has ended, and says what came of them. See isolation/sandbox_tests.py.

sandbox_child.py executes this file before the program runs, with globals and builtins that are this file's alone: what
the program changes in `builtins`, or in the globals of the frames below its own, changes nothing here. It shares the
interpreter all the same: docs/rewards.md says what a program can still do.
"""

from importlib import import_module
from os import read, write

LENGTH_BYTES = 8  # in front of all tests
MOST_CHARS = 1000  # of an error that a test raised


def answer_tests(key: bytes, channel: int, scope: dict) -> None:
    """Tests come one at a time, each when the last is answered with a line: the key, and the error if there was one."""
    said = ""
    while True:
        write(channel, key + " ".join(said.splitlines()).encode(errors="replace") + b"\n")
        source = read_exactly(channel, int.from_bytes(read_exactly(channel, LENGTH_BYTES), "big"))
        if not source:
            return
        said = run_tests(source, scope)


def read_exactly(channel: int, num_bytes: int) -> bytes:
    """Less where the other side is gone."""
    content = b""
    while len(content) < num_bytes and (chunk := read(channel, num_bytes - len(content))):
        content += chunk
    return content


def run_tests(source: bytes, scope: dict) -> str:
    """What went wrong: they raised, or ran unittest or doctest, which need not raise where a test fails."""
    results = collect_made("unittest", "TestResult") if b"unittest" in source else []
    runners = collect_made("doctest", "DocTestRunner") if b"doctest" in source else []
    try:
        exec(compile(source, "tests.py", "exec", dont_inherit=True), scope)
    except BaseException as error:  # answers: the verdict says what the tests did
        if not isinstance(error, SystemExit) or error.code or not results:  # unittest.main leaves when it has passed
            return describe(error)
    if not all(result.wasSuccessful() and result.testsRun > len(result.skipped) for result in results):
        return "unittest ran no test, or one failed"
    if not all(runner.tries and not runner.failures for runner in runners):
        return "doctest ran no example, or one failed"
    return ""


def collect_made(module: str, name: str) -> list:
    """The objects of a class that are made from now on."""
    cls, made = getattr(import_module(module), name), []
    begin = cls.__init__

    def noted(self: object, *arguments: object, **options: object) -> None:
        made.append(self)
        begin(self, *arguments, **options)

    cls.__init__ = noted
    return made


def describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"[:MOST_CHARS]
    except BaseException:  # of a class that the program wrote
        return "an error without words"
