"""An amount per second of wall time, with the clock given."""

import pytest

from tandem.orchestrator.rate import Rate


def test_steps_that_come_in_bursts_have_a_steady_rate() -> None:
    """100 tokens every 5 s on the average, 20 tokens/s; every second batch comes 0.1 s after the one before."""
    rate = Rate(1000.0)
    rates = [rate.add(now, 100) for now in (1010.0, 1010.1, 1020.0, 1020.1, 1030.0, 1030.1)]
    assert rates == pytest.approx([10.0, 19.8, 15.0, 19.9, 16.67, 19.93], abs=0.01)


def test_only_the_last_minute_counts() -> None:
    """A slow start, 1 token/s for a hundred steps of 1 s, then 50: after a minute, 50."""
    rate = Rate(0.0)
    assert [rate.add(float(now), 1) for now in range(1, 101)][-1] == pytest.approx(1.0)
    assert rate.add(101.0, 50) == pytest.approx((59 + 50) / 60)
    assert [rate.add(float(now), 50) for now in range(102, 161)][-1] == pytest.approx(50.0)


def test_steps_longer_than_a_minute_are_averaged_too() -> None:
    """300 s for one batch, nothing for the next, which overlapped with it: over four steps, 2 tokens/s."""
    rate = Rate(0.0)
    ends = (300.0, 300.0, 600.0, 600.0, 900.0, 900.0)
    assert [rate.add(end, 300) for end in ends][-2:] == pytest.approx([4 * 300 / 600] * 2)


def test_a_step_without_time_has_a_rate() -> None:
    assert Rate(5.0).add(5.0, 0) == 0
