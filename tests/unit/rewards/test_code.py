"""Programs against their tests, and programs that would rather not take them."""

import asyncio
import json

import pytest

from tandem.rewards.code import CodeReward, same_output
from tandem.rewards.functions import NoAnswer
from tandem.utils.sandbox import why_unprotected

REASON = why_unprotected()
TESTS = "assert double(2) == 4\nassert double(-1) == -2"
CASES = json.dumps([{"input": "1 2\n", "output": "3"}, {"input": "5 5\n", "output": "10\n"}])
ADD = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"


def score(completion: str, answer: str, *, partial: bool = False, timeout_s: float = 60.0) -> float:
    return asyncio.run(CodeReward(partial=partial, timeout_s=timeout_s)(completion, answer))


pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def test_asserts_in_python() -> None:
    assert score("Sure:\n```python\ndef double(x):\n    return 2 * x\n```\nThat is it.", TESTS) == 1.0
    assert score("def double(x):\n    return x * x", TESTS) == 0.0
    assert score("no program", TESTS) == 0.0
    assert score("", TESTS) == 0.0


@pytest.mark.parametrize(
    "program",
    ["import sys; sys.exit(0)", "import os; os._exit(0)", "exit()", "import os; os.kill(os.getpid(), 9)", "quit(0)"],
)
def test_a_program_that_leaves_before_its_tests_does_not_pass_them(program: str) -> None:
    assert score(program, TESTS) == 0.0


def test_input_and_output() -> None:
    assert score(ADD, CASES) == 1.0
    wrong = "```python\nprint(3)\n```"
    assert score(wrong, CASES) == 0.0
    assert score(wrong, CASES, partial=True) == 0.5


def test_a_program_that_never_ends_fails() -> None:
    assert score("while True: pass", TESTS, timeout_s=0.5) == 0.0


def test_output_is_compared_but_for_white_space_at_ends() -> None:
    assert same_output("a \nb\n\n", "a\nb")
    assert not same_output("a b", "a  b")
    assert not same_output("", "a")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("[]", "an empty list"),
        ("[1]", "not a list of"),
        ("", "is empty"),
        ("assert f(", "no Python: '\\(' was never closed"),
    ],
)
def test_tests_that_are_none(answer: str, message: str) -> None:
    with pytest.raises(NoAnswer, match=message):
        score("x = 1", answer)
