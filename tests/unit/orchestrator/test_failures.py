"""What failed is written down once, and too much of it ends the run."""

from pathlib import Path

import pytest

from tandem.isolation.failures import Failure
from tandem.orchestrator.failures import Attempt, FailureLedger, RolloutFailure, TooManyFailures
from tandem.types.rollout import Task
from tandem.utils.errors import shorten
from tandem.utils.files import read_json_lines
from tandem.utils.run_dir import RunDir

FAILURE = Failure("KeyError: 1", "my_env.py:3 in score", "Traceback …")


@pytest.fixture
def ledger(tmp_path: Path) -> FailureLedger:
    return FailureLedger(RunDir(tmp_path), max_share=0.25)


def attempt(*failures: Failure, completion: str = "text") -> Attempt:
    failed = [RolloutFailure(completion, failure) for failure in failures]
    return Attempt(Task(7, [], ""), group_id=40, number=1, group_size=4, failed=failed)


def test_a_kind_of_failure_is_one_line_with_the_users_traceback(ledger: FailureLedger, tmp_path: Path) -> None:
    ledger.training_attempt(attempt(FAILURE, Failure("the reward is nan"), FAILURE, completion="x" * 2001))
    ledger.evaluation_attempt(attempt(FAILURE))
    ledger.training_attempt(attempt())
    first, second, third = read_json_lines(tmp_path / "failures.jsonl")
    assert first.pop("completion") == shorten("x" * 2001, 2000)
    assert first | {"time": 0} == {
        "time": 0,
        "purpose": "train",
        "task": 7,
        "order": 40,
        "attempt": 2,
        "num_rollouts": 2,
        "reason": "KeyError: 1",
        "where": "my_env.py:3 in score",
        "traceback": "Traceback …",
    }
    assert (second["reason"], second["num_rollouts"]) == ("the reward is nan", 1)
    assert (third["purpose"], third["num_rollouts"]) == ("eval", 1)
    assert ledger.num_failed == 3  # of training


def test_a_task_of_a_mixture_is_named_with_its_environment(
    ledger: FailureLedger, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed = [RolloutFailure("text", FAILURE)]
    task = Task(7, [], "", environment="sums")
    ledger.training_attempt(Attempt(task, group_id=40, number=1, group_size=4, failed=failed))
    line = read_json_lines(tmp_path / "failures.jsonl")[0]
    assert (line["env"], line["task"]) == ("sums", 7)
    assert "train task 7 of sums: 1 × KeyError: 1" in caplog.text


def test_a_share_up_to_the_limit_is_borne(ledger: FailureLedger) -> None:
    """One of four rollouts fails in each of a hundred attempts: 25 %, and no more."""
    for _ in range(100):
        ledger.training_attempt(attempt(FAILURE))
        ledger.check()
    ledger.training_attempt(attempt(FAILURE, FAILURE))
    expected = r"65 of the 256 rollouts of the last 64 groups failed \(max_failed_share = 0\.25 .*\): 65 × KeyError: 1"
    with pytest.raises(TooManyFailures, match=expected):
        ledger.check()


def test_a_window_that_is_not_full_counts_as_if_the_rest_were_good(ledger: FailureLedger) -> None:
    """A quarter of 64 groups is 16: the first 16 may fail, as a bad task at the start does."""
    for _ in range(16):
        ledger.training_attempt(attempt(*[FAILURE] * 4))
        ledger.check()
    ledger.training_attempt(attempt(FAILURE))
    with pytest.raises(TooManyFailures):
        ledger.check()


def test_what_is_long_past_no_longer_counts(ledger: FailureLedger) -> None:
    for _ in range(5):
        for _ in range(16):
            ledger.training_attempt(attempt(*[FAILURE] * 4))
        for _ in range(48):
            ledger.training_attempt(attempt())
        ledger.check()
    assert ledger.num_failed == 5 * 16 * 4


def test_evaluations_do_not_count_towards_the_share(ledger: FailureLedger) -> None:
    for _ in range(64):
        ledger.evaluation_attempt(attempt(*[FAILURE] * 4))
    ledger.check()
