"""Curves drawn with characters."""

import statistics
from collections.abc import Sequence
from itertools import pairwise

BARS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int) -> str:
    """One row; each column is the mean of its share of the values, scaled between least and greatest."""
    columns = resample(values, width)
    if not columns:
        return ""
    low, high = min(columns), max(columns)
    scale = (len(BARS) - 2) / (high - low) if high > low else 0.0
    return "".join(BARS[1 + round((value - low) * scale)] for value in columns)


def plot(values: Sequence[float], width: int, height: int) -> list[str]:
    """Rows from top to bottom, with the greatest and least value at the side."""
    columns = resample(values, width)
    if not columns:
        return []
    low, high = min(columns), max(columns)
    span = (high - low) or 1.0
    levels = [(value - low) / span * height for value in columns]
    rows = []
    for row in range(height - 1, -1, -1):
        cells = [BARS[round(min(max(level - row, 0.0), 1.0) * 8)] for level in levels]
        label = f"{high:.2f}" if row == height - 1 else f"{low:.2f}" if row == 0 else ""
        rows.append(f"{label:>6} ┤{''.join(cells)}")
    return rows


def resample(values: Sequence[float], width: int) -> list[float]:
    if len(values) <= width:
        return list(values)
    edges = [index * len(values) // width for index in range(width + 1)]
    return [statistics.fmean(values[a:b]) for a, b in pairwise(edges)]
