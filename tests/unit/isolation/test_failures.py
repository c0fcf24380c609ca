"""How failures of users' code are written down."""

import pytest

from tandem.isolation.failures import (
    PACKAGE,
    Failure,
    UserCodeError,
    failure_of,
    place_in,
    place_of,
    stack_of,
    top_reasons,
)
from tandem.rewards.pool import RewardFailed


def fail(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def test_an_exception_with_its_place_and_traceback() -> None:
    failure = failure_of(fail(ValueError("no\n  number")))
    assert failure.reason == "ValueError: no number"
    assert failure.where.startswith("test_failures.py:") and failure.where.endswith("in fail")
    assert failure.traceback.startswith("Traceback (most recent call last)") and "raise error" in failure.traceback
    assert failure.frames.startswith('  File "') and "ValueError" not in failure.frames
    assert str(failure) == f"ValueError: no number ({failure.where})"


def test_the_place_is_in_the_users_file_not_in_the_library_it_called() -> None:
    with pytest.raises(ValueError) as caught:
        __import__("json").loads("{")
    assert failure_of(caught.value).where.startswith("test_failures.py:")


def test_what_has_no_text_or_too_much_of_it() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert failure_of(fail(Mute())).reason == "Mute: (its text cannot be made)"
    assert failure_of(fail(KeyboardInterrupt())).reason == "KeyboardInterrupt"
    novel = failure_of(fail(ValueError("x" * 200_000)))
    assert len(novel.reason) < 500 and len(novel.traceback) < 9000


def test_errors_in_tasks_of_a_group_are_told_by_the_first() -> None:
    failure = failure_of(fail(BaseExceptionGroup("unhandled", [fail(ValueError("no number")), fail(KeyError("x"))])))
    assert failure.reason == "ValueError: no number"
    assert failure.where.startswith("test_failures.py:") and "raise error" in failure.frames


def test_a_failure_from_another_process_stays_as_it_is() -> None:
    failure = Failure("KeyError: 1", "my_env.py:3 in score", "Traceback …")
    assert failure_of(fail(UserCodeError(failure))) is failure


def test_what_failed_in_another_process_is_told_with_its_place_there() -> None:
    failure = failure_of(fail(RewardFailed("exact: KeyError: 1", "rewards.py:3 in exact")))
    assert str(failure) == "RewardFailed: exact: KeyError: 1 (rewards.py:3 in exact)"
    assert failure.kind == "RewardFailed (rewards.py:3 in exact)"
    assert failure_of(fail(RewardFailed("too slow"))).where.startswith("test_failures.py:")


def test_reasons_are_counted_by_type_and_place_not_by_text() -> None:
    failures = [Failure(f"ValueError: no number in {n}", "a.py:3 in score") for n in range(5)]
    failures += [Failure("ValueError: other", "a.py:9 in score")] * 2 + [Failure("KeyError: 1")] + [Failure("rare: 2")]
    assert top_reasons(failures) == (
        "5 × ValueError: no number in 0 (a.py:3 in score); 2 × ValueError: other (a.py:9 in score); 1 × KeyError: 1"
    )


def test_the_place_in_stacks_is_the_innermost_of_the_users() -> None:
    library = place_of.__code__.co_filename
    stacks = f'Thread 1:\n  File "{library}", line 5 in a\n  File "/x/my_env.py", line 12 in inner\n'
    assert place_in(stacks + '  File "/x/my_env.py", line 30 in score\n') == "my_env.py:12 in inner"
    assert place_in("") == ""


def test_the_stack_of_one_thread() -> None:
    waits = 'Thread 0x00007f01 (most recent call first):\n  File "/x/my_env.py", line 3 in waits\n'
    hangs = 'Current thread 0x00007f0a [main] (most recent call first):\n  File "/x/my_env.py", line 5 in hangs\n'
    stacks = f"{waits}\n{hangs}"
    assert stack_of(0x7F01, stacks) == waits and stack_of(0x7F0A, stacks) == hangs
    assert stack_of(0x7F0, stacks) == stacks


def test_where_a_function_is_defined() -> None:
    assert place_of(fail).endswith("in fail") and place_of(fail).startswith("test_failures.py:")
    assert place_of(len) == ""


def test_frames_of_our_own_are_not_shown_to_users() -> None:
    ours = f'Traceback:\n  File "{PACKAGE}/rewards/servers.py", line 1, in ask\n    raise x\nX: y\n'
    theirs = ours.replace(PACKAGE, "/home/me")
    assert Failure("X: y", traceback=ours).frames == ""
    assert Failure("X: y", traceback=ours + theirs).frames.count("File") == 2
