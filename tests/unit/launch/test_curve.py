"""Curves drawn with characters, by hand."""

import pytest

from tandem.launch.curve import plot, resample, sparkline


def test_sparkline() -> None:
    """From least to greatest in eight bars: 0 is the lowest, 7 the highest, each step one more."""
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], width=8) == "▁▂▃▄▅▆▇█"
    assert sparkline([1.0, 0.0, 0.3], width=10) == "█▁▃"  # 0.3 of seven steps: two
    assert sparkline([0.3, 0.3], width=4) == "▁▁"
    assert sparkline([], width=4) == ""


def test_sparkline_of_more_values_than_columns() -> None:
    """Means of pairs: 0, 7, 7."""
    assert sparkline([0, 0, 7, 7, 6, 8], width=3) == "▁██"


def test_resample() -> None:
    assert resample([1, 2, 3], 5) == [1, 2, 3]
    assert resample([1, 2, 3, 4], 2) == [1.5, 3.5]
    assert resample([1, 2, 3, 4, 5], 2) == [1.5, 4.0]
    assert resample([], 3) == []


@pytest.mark.parametrize("width", [1, 7, 60])
def test_resample_keeps_the_width_and_the_mean_of_a_constant(width: int) -> None:
    assert resample([0.25] * 100, width) == [0.25] * width


def test_plot() -> None:
    """Two rows: 0 leaves both empty, 1/2 fills the lower one, 1 fills both."""
    assert plot([0.0, 0.5, 1.0], width=10, height=2) == ["  1.00 ┤  █", "  0.00 ┤ ██"]
    assert plot([0.0, 0.25, 1.0], width=10, height=2) == ["  1.00 ┤  █", "  0.00 ┤ ▄█"]


def test_plot_of_a_constant_and_of_nothing() -> None:
    assert plot([0.5, 0.5], width=4, height=3) == ["  0.50 ┤  ", "       ┤  ", "  0.50 ┤  "]
    assert plot([], width=4, height=3) == []
