"""What pytest's end says of a mutant."""

import pytest
from tests.mutants.run import HANGS, NO_END, verdict_of


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "", "SURVIVED"),
        (1, "1 failed", "killed"),
        (1, "Failed: Timeout", HANGS),
        (3, "INTERNALERROR>", "killed"),
        (-11, "", "killed"),
        (NO_END, "", HANGS),
    ],
)
def test_verdicts(code: int, output: str, verdict: str) -> None:
    assert verdict_of(code, output) == verdict


def test_tests_that_are_not_there_are_no_verdict() -> None:
    with pytest.raises(RuntimeError, match="pytest ended with 4: file not found"):
        verdict_of(4, "file not found")
