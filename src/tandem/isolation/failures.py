"""What went wrong in code that users bring: one line, where in their file, and their own traceback. Pure.

Made in the process that runs that code, recorded by the orchestrator.
"""

import inspect
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from tandem.utils.errors import shorten
from tandem.utils.places import (
    MAX_REASON,
    PACKAGE,
    FailedElsewhere,
    innermost,
    one_line,
    printable,
    shown_place,
    user_place,
    with_place,
)

MAX_TRACEBACK = 8000
MAX_FRAMES = 20


Fault = Literal["code", "time", "memory", "crash"]
"""Whose fault it was: what the code did, the time it took, the memory it most likely took, or that it ended its
process. What is none of these, such as a server that does not answer, has no frames of users' code."""


@dataclass(frozen=True)
class Failure:
    reason: str  # "ValueError: no number in 'abc'", without line breaks
    where: str = ""  # "my_env.py:12 in score"; empty if unknown
    traceback: str = ""
    fault: Fault = "code"

    def __str__(self) -> str:
        return with_place(self.reason, self.where)

    @property
    def frames(self) -> str:
        """The traceback without its first and last line, for a message that says the rest itself. Empty where all of it
        is ours: a server that does not answer, say."""
        files = re.findall(r'^  File "(.+?)"', self.traceback, re.MULTILINE)
        if all(file.startswith(PACKAGE) for file in files):
            return ""
        return "\n".join(line for line in self.traceback.splitlines() if line.startswith("  "))

    @property
    def kind(self) -> str:
        """What makes two failures the same, whatever the text that was scored: the error's type and its place."""
        return f"{self.reason.partition(':')[0]} ({self.where})"


class UserCodeError(RuntimeError):
    """Code that a user brought failed; `failure` tells how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class TimedOut(UserCodeError):
    """It did not end within its time."""


def failure_of(error: BaseException) -> Failure:
    """An exception as it is recorded. The frames above the user's code, which are ours, are left out."""
    if isinstance(error, UserCodeError):
        return error.failure
    while isinstance(error, BaseExceptionGroup):  # of a TaskGroup, whose own text says nothing; the first tells it
        error = error.exceptions[0]
    lines = traceback.TracebackException(type(error), error, _own_part(error.__traceback__), limit=-MAX_FRAMES)
    frames = [(frame.filename, frame.lineno or 0, frame.name) for frame in lines.stack]
    reason, where = one_line(error), innermost(frames)
    if isinstance(error, FailedElsewhere):
        reason = shorten(f"{type(error).__name__}: {error.reason}", MAX_REASON)
        where = error.where or user_place(error)
    return Failure(reason, where, printable(shorten("".join(lines.format()), MAX_TRACEBACK)))


def hung_at(reason: str, frames: traceback.StackSummary) -> Failure:
    """Code that was over its time, and where it was then."""
    places = [(frame.filename, frame.lineno or 0, frame.name) for frame in frames]
    return Failure(reason, innermost(places), shorten("".join(frames.format()), MAX_TRACEBACK), "time")


def place_in(stacks: str) -> str:
    """The place in stacks as faulthandler writes them, innermost frame first."""
    found = re.findall(r'File "(.+)", line (\d+) in (.+)', stacks)
    return innermost([(filename, int(line), name) for filename, line, name in reversed(found)])


def stack_of(thread: int, stacks: str) -> str:
    """What such stacks say of one thread; all of them where it is not among them."""
    found = re.search(rf"^(?:Current thread|Thread) 0x0*{thread:x}\b.*\n(?:  .*\n?)*", stacks, re.MULTILINE)
    return found.group() if found else stacks


def place_of(function: Callable[..., Any]) -> str:
    """Where a function is defined, as far as that can be known."""
    code = getattr(inspect.unwrap(getattr(function, "__func__", function)), "__code__", None)
    return "" if code is None else shown_place(code.co_filename, code.co_firstlineno, code.co_name)


def top_reasons(failures: Iterable[Failure], limit: int = 3) -> str:
    """The most frequent kinds of failure, counted, each with its first text."""
    examples: dict[str, Failure] = {}
    counts: Counter[str] = Counter()
    for failure in failures:
        examples.setdefault(failure.kind, failure)
        counts[failure.kind] += 1
    return "; ".join(f"{count} × {examples[kind]}" for kind, count in counts.most_common(limit))


def _own_part(frames: TracebackType | None) -> TracebackType | None:
    """The traceback from the first frame outside this package on; all of it where there is none."""
    found = frames
    while found is not None and found.tb_frame.f_code.co_filename.startswith(PACKAGE):
        found = found.tb_next
    return found or frames
