"""Programs that the model writes, run in the sandbox (isolation/sandbox.py) against the tests of the task."""

import ast
import asyncio
import json
import warnings
from dataclasses import dataclass, field
from typing import Any

from tandem.isolation.sandbox import SandboxResult, run_python
from tandem.rewards.formats import last_fenced
from tandem.rewards.functions import NoAnswer
from tandem.utils.processes import usable_cores

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)


@dataclass(frozen=True)
class Case:
    """A program that gets `input` has to print `output`."""

    input: str
    output: str


@dataclass(frozen=True)
class CodeReward:
    """The share of the tests that pass; without `partial`, 1 where all of them do.

    Tests, in the task's answer: Python that is run after the program, in its module, and must not raise; or a JSON list
    of {"input": …, "output": …}, whose output is compared outside the sandbox.
    """

    partial: bool
    timeout_s: float
    memory_mb: int
    allow_unprotected: bool
    # Programs at the same time: more would time out for want of a core.
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(usable_cores()))

    async def __call__(self, completion: str, answer: str) -> float:
        program = last_fenced(completion) or completion
        cases = parse_cases(answer)
        if cases is None:
            return float(await self._passes(program, answer))
        passed = await asyncio.gather(*(self._prints(program, case) for case in cases))
        return sum(passed) / len(passed) if self.partial else float(all(passed))

    async def _passes(self, program: str, tests: str) -> bool:
        result = await self._run(program, tests=tests)
        return result.succeeded and result.passed

    async def _prints(self, program: str, case: Case) -> bool:
        result = await self._run(program, stdin=case.input)
        return result.succeeded and output_lines(result.stdout) == output_lines(case.output)

    async def _run(self, program: str, *, stdin: str = "", tests: str | None = None) -> SandboxResult:
        async with self._slots:
            return await run_python(
                program,
                stdin=stdin,
                tests=tests,
                timeout_s=self.timeout_s,
                memory_mb=self.memory_mb,
                allow_unprotected=self.allow_unprotected,
            )


def parse_cases(answer: str) -> list[Case] | None:
    """The cases of input and output; None where the tests are Python."""
    try:
        parsed: Any = json.loads(answer)
    except ValueError:
        if not answer.strip():
            raise NoAnswer("the answer of the task is empty: there are no tests to run") from None
        _refuse_broken(answer)
        return None
    try:
        cases = [Case(str(case["input"]), str(case["output"])) for case in parsed]
    except (TypeError, KeyError) as error:
        raise NoAnswer(f'the tests {answer[:80]!r} are not a list of {{"input": …, "output": …}}') from error
    if not cases:
        raise NoAnswer("the answer of the task is an empty list: there are no tests to run")
    return cases


def _refuse_broken(tests: str) -> None:
    """Tests that are no Python would fail whatever the program does, and those that only define would pass."""
    try:
        with warnings.catch_warnings(action="ignore"):
            statements = ast.parse(tests).body
    except (SyntaxError, ValueError) as error:
        raise NoAnswer(f"the tests {tests[:80]!r} are no Python: {error}") from error
    if all(isinstance(statement, DEFINITIONS) or _is_constant(statement) for statement in statements):
        raise NoAnswer(f"the tests {tests[:80]!r} run nothing: call what they define, or end in unittest.main()")


def _is_constant(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def output_lines(text: str) -> list[str]:
    """Without white space at the end of lines and of the text, which makes no difference."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
