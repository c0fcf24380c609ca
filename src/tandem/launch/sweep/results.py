"""The table and the plot of a sweep: results.csv, results.svg, and the table on the terminal."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.table import Column, Table

from tandem.launch.sweep.states import METRICS, Progress
from tandem.utils.console import Console
from tandem.utils.files import is_number, write_atomic
from tandem.utils.metrics import read_metrics
from tandem.utils.progress import count_runs
from tandem.utils.run_dir import RunDir

WIDTH, HEIGHT, LEFT, TOP = 560, 300, 70, 30
MAX_SHOWN = 4  # metrics on a terminal, or as many as it has room for; the file has all
SHORTEST_TEXT = 14  # columns that a name or a state is left in the table
COLOURS = ("#36c", "#d33", "#293", "#e80", "#83c", "#0aa", "#a52", "#c3a", "#777", "#590", "#06a", "#b04")


def write_results(output_dir: Path, items: Sequence[Progress]) -> None:
    write_atomic(output_dir / "results.csv", as_csv(items).encode())
    write_atomic(output_dir / "results.svg", draw(items).encode())


def columns(items: Sequence[Progress]) -> tuple[list[str], list[str]]:
    """Names of what varies, and of the metrics that any run has."""
    varied = dict.fromkeys(name for item in items for name in item.run.varied)
    metrics = dict.fromkeys(name for item in items for name in item.metrics)
    return [*varied], [*metrics]


def as_csv(items: Sequence[Progress]) -> str:
    varied, metrics = columns(items)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["name", *varied, "state", "step", "max_steps", *metrics])
    for item in items:
        values = [item.run.varied.get(name, "") for name in varied]
        numbers = [item.metrics.get(name, "") for name in metrics]
        writer.writerow([item.run.name, *values, item.state, item.step, item.max_steps or "", *numbers])
    return text.getvalue()


def show(console: Console, output_dir: Path, items: Sequence[Progress]) -> None:
    metrics = columns(items)[1][:MAX_SHOWN]
    while metrics and not console.fits(_table(items, metrics, SHORTEST_TEXT)):
        metrics.pop()
    console.print(_table(items, metrics))
    states = [item.state for item in items]
    told = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    files = f"Results: {output_dir / 'results.csv'}, results.svg"
    console.print(f"{count_runs(len(items))}: {told}. {files}", soft_wrap=not console.is_terminal)


def _table(items: Sequence[Progress], metrics: Sequence[str], max_width: int | None = None) -> Table:
    """`max_width`: of names and states, which may be wrapped; numbers may not."""
    numbers = [Column(name, no_wrap=True) for name in ("step", *metrics)]
    texts = [Column(name, overflow="fold", max_width=max_width) for name in ("run", "state")]
    table = Table(*texts, *numbers)
    for item in items:
        steps = f"{item.step}/{item.max_steps}" if item.max_steps else str(item.step)
        values = [f"{item.metrics[name]:.4g}" if name in item.metrics else "" for name in metrics]
        table.add_row(item.run.name, _told_state(item), steps, *values)
    return table


def _told_state(item: Progress) -> str:
    if item.damage:
        return f"{item.state} ({item.damage})"
    is_evaluated = item.evaluation in (None, "finished")
    return item.state if is_evaluated else f"{item.state}, evaluation {item.evaluation}"


def draw(items: Sequence[Progress]) -> str:
    """One panel for each algorithm's most telling metric, one curve a run."""
    panels, top = [], 0
    for algorithm in dict.fromkeys(item.run.algorithm for item in items):
        mine = [item for item in items if item.run.algorithm == algorithm]
        telling = METRICS[mine[0].run.command]
        metric = next((name for name in telling if any(name in item.metrics for item in mine)), None)
        if metric is None:
            continue
        curves = {item.run.name: _curve(item, metric) for item in mine if not item.damage}
        panels.append(_panel(f"{algorithm}: {metric}", {name: curve for name, curve in curves.items() if curve}, top))
        top += max(HEIGHT + 3 * TOP, TOP * 2 + 16 * len(curves))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH + 2 * LEFT + 420}" height="{max(top, TOP)}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(panels)
        + "\n</svg>\n"
    )


def _curve(item: Progress, metric: str) -> list[tuple[int, float]]:
    lines = [line for line in read_metrics(RunDir(item.run.directory)) if _is_finite(line.get(metric))]
    # A resumed run writes the steps after its checkpoint again: the last line of a step counts.
    return sorted({line["step"]: line[metric] for line in lines}.items())


def _is_finite(value: Any) -> bool:
    return is_number(value) and math.isfinite(value)


def _panel(title: str, curves: Mapping[str, list[tuple[int, float]]], top: int) -> str:
    points = [point for curve in curves.values() for point in curve]
    last = max((step for step, _ in points), default=1) or 1
    low, high = min((value for _, value in points), default=0.0), max((value for _, value in points), default=1.0)
    bottom = top + TOP + HEIGHT

    def place(step: int, value: float) -> str:
        height = (value - low) / (high - low) * HEIGHT if high > low else 0
        return f"{LEFT + step / last * WIDTH:.1f},{bottom - height:.1f}"

    parts = [
        f'<text x="{LEFT}" y="{top + TOP - 10}" font-weight="bold">{escape(title)}</text>',
        f'<rect x="{LEFT}" y="{top + TOP}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#999"/>',
        f'<text x="{LEFT - 6}" y="{top + TOP + 10}" text-anchor="end">{high:.4g}</text>',
        f'<text x="{LEFT - 6}" y="{bottom}" text-anchor="end">{low:.4g}</text>',
        f'<text x="{LEFT + WIDTH}" y="{bottom + 16}" text-anchor="end">step {last}</text>',
    ]
    for number, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(place(*point) for point in curve)
        x, y = place(*curve[-1]).split(",")
        legend = top + TOP + 12 + 16 * number
        parts += [
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>',
            f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>',
            f'<text x="{LEFT + WIDTH + 14}" y="{legend}" fill="{colour}">{escape(name)}: {curve[-1][1]:.4g}</text>',
        ]
    return "\n".join(parts)
