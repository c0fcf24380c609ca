"""What a command says while it works."""

import pytest

from tandem.utils.progress import count_runs, reported


def test_long_work_is_told_every_two_seconds_and_short_work_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    done = []
    for item in reported(range(5_000), "sweep", "runs checked", clock=lambda: now[0]):
        done.append(item)
        now[0] += 1 / 1024
    assert done == list(range(5_000))
    assert capsys.readouterr().err == ("sweep: 2,048 of 5,000 runs checked\nsweep: 4,096 of 5,000 runs checked\n")
    assert (count_runs(1), count_runs(12), count_runs(60_000)) == ("1 run", "12 runs", "60,000 runs")
    assert list(reported("abc", "sweep", "runs written", clock=lambda: now[0])) == ["a", "b", "c"]
    assert capsys.readouterr().err == ""
