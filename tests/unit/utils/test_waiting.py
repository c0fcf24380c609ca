"""Waits have an end, a progress line and a name."""

import logging
import time

import pytest

from tandem.utils.waiting import Deadline, wait_for


def test_the_time_is_over() -> None:
    deadline = Deadline("the trainer", timeout_s=2.5, hint="see logs/trainer.log", started=time.monotonic() - 3)
    with pytest.raises(TimeoutError, match=r"^waited 2\.5 s for the trainer; see logs/trainer\.log$"):
        deadline.check()


def test_progress_is_logged_once_an_interval(caplog: pytest.LogCaptureFixture) -> None:
    deadline = Deadline("the trainer", timeout_s=100, hint="", started=time.monotonic() - 20)
    with caplog.at_level(logging.INFO):
        deadline.check()
        deadline.check()
    assert [record.getMessage() for record in caplog.records] == ["still waiting for the trainer (20 of 100 s)"]


def test_in_time_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Deadline("the trainer", timeout_s=100, hint="").check()
    assert caplog.records == []


def test_wait_for_gives_the_value_when_it_comes() -> None:
    answers = iter([None, None, 0])
    assert wait_for(lambda: next(answers), Deadline("x", 5, ""), poll_s=0.001) == 0
    with pytest.raises(TimeoutError):
        wait_for(lambda: None, Deadline("x", 0.01, ""), poll_s=0.001)
