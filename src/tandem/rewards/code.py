"""Programs that the model writes, run in the sandbox (utils/sandbox.py) against the tests of the task."""

import ast
import asyncio
import json
import os
import secrets
import warnings
from dataclasses import dataclass, field
from typing import Any

from tandem.rewards.formats import last_fenced
from tandem.rewards.functions import NoAnswer
from tandem.utils.sandbox import SandboxResult, run_python


@dataclass(frozen=True)
class Case:
    """A program that gets `input` has to print `output`."""

    input: str
    output: str


@dataclass(frozen=True)
class CodeReward:
    """The share of the tests that pass; without `partial`, 1 where all of them do.

    Tests, in the task's answer: Python that is run behind the program and must not raise, or a JSON list of
    {"input": …, "output": …}, whose output is compared outside the sandbox.
    """

    partial: bool = False
    timeout_s: float = 10.0
    memory_mb: int = 512
    allow_unprotected: bool = False
    # Programs at the same time: more would time out for want of a core.
    _slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(os.cpu_count() or 1), repr=False)

    async def __call__(self, completion: str, answer: str) -> float:
        program = last_fenced(completion) or completion
        cases = parse_cases(answer)
        if cases is None:
            return float(await self._survives(program, answer))
        passed = await asyncio.gather(*(self._prints(program, case) for case in cases))
        return sum(passed) / len(passed) if self.partial else float(all(passed))

    async def _survives(self, program: str, tests: str) -> bool:
        """A program that exits before its tests does not pass them: what is printed behind them is not known to it."""
        passed = secrets.token_hex(16)
        result = await self._run(f"{program}\n\n{tests}\n\nprint('\\n{passed}')\n", "")
        return result.succeeded and result.stdout.endswith(f"\n{passed}\n")

    async def _prints(self, program: str, case: Case) -> bool:
        result = await self._run(program, case.input)
        return result.succeeded and same_output(result.stdout, case.output)

    async def _run(self, program: str, stdin: str) -> SandboxResult:
        async with self._slots:
            return await run_python(
                program,
                stdin=stdin,
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
    """Tests that are no Python would fail whatever the program does."""
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(tests)
    except (SyntaxError, ValueError) as error:
        raise NoAnswer(f"the tests {tests[:80]!r} are no Python: {error}") from error


def same_output(printed: str, expected: str) -> bool:
    """Line by line, but for white space at the end of lines and of the text."""
    first, second = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    return first == second
