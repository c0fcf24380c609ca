"""Of several errors, the one that a user is told."""

import errno

import pytest

from tandem.orchestrator.causes import cause_of
from tandem.orchestrator.client import ServerLost
from tandem.orchestrator.failures import TooManyFailures
from tandem.utils.errors import UserError

FULL = OSError(errno.ENOSPC, "No space left on device")
DAMAGED = IsADirectoryError(errno.EISDIR, "Is a directory")


@pytest.mark.parametrize(
    ("met", "cause"),
    [
        ([FULL, FULL], FULL),
        ([KeyError(), FULL], FULL),
        ([ServerLost(), OSError(errno.EDQUOT, "Disk quota exceeded")], "Disk quota exceeded"),
        ([KeyError(), ExceptionGroup("of a task", [FULL, FULL])], FULL),
        ([DAMAGED, DAMAGED], DAMAGED),
        ([UserError("one"), UserError("other")], "one"),
        ([KeyError(), TooManyFailures("9 of 9")], "9 of 9"),
        ([KeyError(), TooManyFailures("9 of 9"), ServerLost("taken")], "taken"),
        ([ExceptionGroup("of a task", [KeyError("x")])], "'x'"),
        ([KeyError(), DAMAGED], "of the loop (2 sub-exceptions)"),
    ],
)
def test_of_several_tasks_that_fail_at_once_the_cause_is_told(met: list[Exception], cause: object) -> None:
    assert str(cause) in str(cause_of(ExceptionGroup("of the loop", met)))
