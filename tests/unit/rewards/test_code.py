"""Programs against their tests, and programs that would rather not take them."""

import asyncio
import json

import pytest

from tandem.isolation.sandbox import why_unprotected
from tandem.rewards.code import CodeReward, output_lines
from tandem.rewards.functions import NoAnswer

REASON = why_unprotected()
GOOD, WRONG = "def double(x): return 2 * x", "def double(x): return x * x + 1"
TESTS = "assert double(2) == 4\nassert double(-1) == -2"
CASES = json.dumps([{"input": "1 2\n", "output": "3"}, {"input": "5 5\n", "output": "10\n"}])
ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"


def score(completion: str, answer: str, *, partial: bool = False, timeout_s: float = 60.0) -> float:
    return asyncio.run(CodeReward(partial, timeout_s, memory_mb=512, allow_unprotected=False)(completion, answer))


pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def test_asserts_in_python() -> None:
    assert score("Sure:\n```python\ndef double(x):\n    return 2 * x\n```\nThat is it.", TESTS) == 1.0
    assert score("def double(x):\n    return x * x", TESTS) == 0.0
    assert score("no program", TESTS) == 0.0
    assert score("", TESTS) == 0.0


UNITTEST = """
import unittest
class Doubles(unittest.TestCase):
    def test_two(self):
        self.assertEqual(double(2), 4)
"""
SKIPPED = UNITTEST.replace("class", "@unittest.skip('')\nclass")
DOCTEST = "import doctest\n__test__ = {'two': '>>> double(2)\\n4'}\n"


@pytest.mark.parametrize(
    "tests",
    [
        f"{UNITTEST}unittest.main(exit=False)",
        f"{UNITTEST}if __name__ == '__main__':\n    unittest.main()",
        f"{UNITTEST}unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(Doubles))",
        f"{DOCTEST}doctest.testmod()",
        f"{DOCTEST}doctest.run_docstring_examples(__test__['two'], globals())",
    ],
)
def test_libraries_that_count_failures_instead_of_raising(tests: str) -> None:
    assert score(GOOD, tests) == 1.0
    assert score(WRONG, tests) == 0.0


@pytest.mark.parametrize(
    "tests",
    [
        "import unittest\nunittest.main(exit=False)",
        f"{SKIPPED}unittest.main(exit=False)",
        "import doctest\ndoctest.testmod()",
    ],
)
def test_no_program_passes_tests_that_are_not_run(tests: str) -> None:
    assert score(GOOD, tests) == 0.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "exit()",
        "import os; os.kill(os.getpid(), 9)",
        "import os\ndef double(x): os._exit(0)",
        "import sys\ndef double(x): sys.exit(0)",
        "import functools, sys\ndouble = functools.partial(sys.exit, 0)",
    ],
)
def test_a_program_that_leaves_before_its_tests_does_not_pass_them(program: str) -> None:
    assert score(program, TESTS) == 0.0


PASSED = """
import os
for number in range(3, 128):
    try: os.write(number, b'\\n' * {times})
    except OSError: pass
"""
# A program that knows how tests are sent, and answered, and where in the process what answers them may be.
SKIPS_TESTS = """
import builtins
real = builtins.compile
def skip(source, *rest, **options):
    return real(source if bytes(source).startswith(b'raise ') else b'', *rest, **options)
builtins.compile = skip
"""
IMITATES = """
import os, re, sys
def imitate(channel, key):
    os.write(channel, key + b'\\n'); os.read(channel, 9999); os.write(channel, key + b'\\n')
    text = re.search(rb"AssertionError\\('(\\w+)'\\)", os.read(channel, 9999))[1]
    os.write(channel, key + b'AssertionError: ' + text + b'\\n')
    os._exit(0)
def frames():
    frame = sys._getframe(1)
    while frame:
        yield frame
        frame = frame.f_back
"""
BY_NUMBER = """
for number in range(3, 128):
    try: imitate(number, b'')
    except OSError: pass
"""
BY_FRAMES = """
seen = [value for frame in frames() for value in frame.f_locals.values()]
numbers = [value['channel'] for value in seen if isinstance(value, dict) and 'channel' in value]
keys = [value for value in seen if isinstance(value, bytes) and len(value) == 32]
imitate(numbers[0], keys[0] if keys else b'')
"""
ANSWERS_ITSELF = """
def answer(source, scope):
    return 'AssertionError: ' + source.decode().split("'")[1] if source.startswith(b'raise ') else ''
for frame in frames():
    frame.f_globals['run_tests'] = answer
"""


@pytest.mark.parametrize(
    "trick",
    [
        "import atexit, os; atexit.register(os._exit, 0)",
        "import sys; sys.excepthook = lambda *_: None",
        "import builtins; builtins.exec = lambda *_: None",
        "import builtins; builtins.compile = lambda *_, **options: (lambda: 0).__code__",
        "import builtins, os; builtins.AssertionError = lambda *_: os._exit(0)",
        PASSED.format(times=1),
        PASSED.format(times=9) + "os._exit(0)",
        f"def double(x):\n    exec({PASSED.format(times=1)!r}, globals())\n    os._exit(0)",
        SKIPS_TESTS,
        IMITATES + BY_NUMBER,
        IMITATES + BY_FRAMES,
        IMITATES + ANSWERS_ITSELF,
    ],
)
def test_a_wrong_program_with_a_trick_does_not_pass(trick: str) -> None:
    assert score(f"{WRONG}\n{trick}", TESTS) == 0.0


def test_a_program_that_changes_builtins_does_not_change_what_counts_failures() -> None:
    trick = "import builtins; builtins.all = lambda results: True"
    assert score(f"{WRONG}\n{trick}", f"{UNITTEST}unittest.main(exit=False)") == 0.0
    assert score(f"{GOOD}\n{trick}", f"{UNITTEST}unittest.main(exit=False)") == 1.0


def test_the_tests_are_nowhere_while_the_program_runs() -> None:
    """Neither in a file, an argument or a frame, nor to be read from what is open before the program has ended."""
    search = """
import gc, os, sys
seen = [open(__file__).read(), str(sys.orig_argv), str(dict(os.environ)), str(gc.get_objects())]
frame = sys._getframe()
while frame:
    seen.append(str(frame.f_locals))
    frame = frame.f_back
for number in range(3, 128):
    try:
        os.set_blocking(number, False)
        seen.append(str(os.read(number, 9999)))
    except BlockingIOError: os.set_blocking(number, True)
    except OSError: pass
assert "-".join(("sesame", "1729")) not in "".join(seen)
"""
    assert score(f"{GOOD}\n{search}", f"{TESTS}  # sesame-1729") == 1.0


@pytest.mark.parametrize(
    "more",
    [
        "import builtins; builtins.print = None",
        "import io, sys; sys.stdout = io.StringIO()",
        "import atexit; atexit.register(print, 'good-bye')",
        "if __name__ == '__main__':\n    print(double(int(input())))",
        "import sys\nif __name__ == '__main__':\n    sys.exit(print(double(2)))",
        "import pickle\nclass Own: pass\nassert type(pickle.loads(pickle.dumps(Own()))) is Own",
        "import pathlib; assert 'def double' in pathlib.Path(__file__).read_text()",
        "import threading; threading.Thread(target=print).start()",
    ],
)
def test_what_honest_programs_do_costs_them_nothing(more: str) -> None:
    assert score(f"{GOOD}\n{more}", TESTS) == 1.0
    assert score(f"{WRONG}\n{more}", TESTS) == 0.0


def test_a_program_that_raises_does_not_pass() -> None:
    assert score(f"{GOOD}\nraise ValueError", TESTS) == 0.0


def test_fences_of_every_kind() -> None:
    for text in (f"```python\n{GOOD}\n```", f"Here:\n~~~py\n{GOOD}\n~~~\nDone."):
        assert score(text, TESTS) == 1.0
        assert score(text.replace("\n", "\r\n"), TESTS) == 1.0


def test_fences_inside_a_program_are_part_of_it() -> None:
    quoting = "def double(x):\n    mark = '```'\n    return 2 * x  # ``` ~~~\n"
    for text in (f"So:\n```{{.python}}\n{quoting}```\nDone.", f'``` python title="a b"\n{quoting}   ```'):
        assert score(text, TESTS) == 1.0
        assert score(text.replace("\n", "\r\n"), TESTS) == 1.0


def test_a_program_in_a_list_is_taken_without_its_indentation() -> None:
    program = "def double(x):\n    return 2 * x".replace("\n", "\n    ")
    assert score(f"1. So:\n\n    ```python\n    {program}\n    ```\n2. Done.", TESTS) == 1.0


def test_input_and_output() -> None:
    assert score(ADD, CASES) == 1.0
    assert score(ADD, '[{"input": "1 2", "output": 3}]') == 1.0
    assert score("print(input())", '[{"input": 4, "output": "4"}]') == 1.0
    wrong = "```python\nprint(3)\n```"
    assert score(wrong, CASES) == 0.0
    assert score(wrong, CASES, partial=True) == 0.5


def test_a_program_that_never_ends_fails() -> None:
    assert score("while True: pass", TESTS, timeout_s=0.5) == 0.0


def test_output_is_compared_but_for_white_space_at_ends() -> None:
    assert output_lines("a \nb\n\n") == output_lines("a\nb") == ["a", "b"]
    assert output_lines(" a  b") == [" a  b"]
    assert output_lines("\n") == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("[]", "an empty list"),
        ("[1]", "not a list of"),
        ("", "is empty"),
        (" \n", "is empty"),
        ("assert f(", "no Python: '\\(' was never closed"),
        ("def test_f():\n    assert f(1) == 2", r"run nothing: call what they define, or end in unittest.main\(\)"),
        (f"'doubles'\n{UNITTEST}", "run nothing"),
    ],
)
def test_tests_that_are_none(answer: str, message: str) -> None:
    with pytest.raises(NoAnswer, match=message):
        score("x = 1", answer)
