"""What a user sees while a run goes on: a live display on a terminal, prefixed log lines elsewhere."""

import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Protocol

from rich.columns import Columns
from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem.launch.plan import ProcessPlan
from tandem.utils.console import Console
from tandem.utils.files import Follower
from tandem.utils.findings import Watch
from tandem.utils.metrics import parse_metrics_line, read_metrics
from tandem.utils.run_dir import RunDir

BARS = " ▁▂▃▄▅▆▇█"
STYLES = {"inference": "cyan", "orchestrator": "green", "trainer": "magenta"}
WIDTH = 60  # of the bar and the curve, where there is room
FINDING_STYLES = {"note": "dim", "warning": "yellow", "error": "bold red"}


class RunView(Protocol):
    """Shown every time the supervisor ticks."""

    def tick(self) -> None: ...

    def close(self) -> None: ...


class LogLines:
    """Every log line of every process, with its name in front."""

    def __init__(self, console: Console, plans: list[ProcessPlan]) -> None:
        self.console = console
        self.followers = {plan.name: Follower(plan.log, from_end=True) for plan in plans}

    def tick(self) -> None:
        for name, follower in self.followers.items():
            for line in follower.lines():
                style = STYLES.get(name.partition("_")[0], "")
                self.console.print_line(f"{name:>12} │ ", line, prefix_style=style)

    def close(self) -> None:
        self.tick()


class LiveDisplay:
    """Step, reward, staleness, tokens/s, time left and findings, redrawn in place; warnings scroll by above."""

    def __init__(
        self, console: Console, plans: list[ProcessPlan], run_dir: RunDir, start_step: int, max_steps: int
    ) -> None:
        self.console = console
        self.start_step = start_step
        self.max_steps = max_steps
        self.started = time.monotonic()
        self.first_step_at: float | None = None
        self.rewards: list[float] = []
        self.orchestrator: dict[str, Any] = {}
        self.trainer: dict[str, Any] = {}
        self.held_out: dict[int, float] = {}
        self._watch = Watch(read_metrics(run_dir))
        self._metrics = Follower(run_dir.metrics, from_end=True)
        self._logs = {plan.name: Follower(plan.log, from_end=True) for plan in plans}
        self._next_draw = 0.0
        self._live = Live(self._render(), console=console, auto_refresh=False)
        self._live.start()

    def tick(self) -> None:
        for line in self._metrics.lines():
            if (record := parse_metrics_line(line)) is not None:
                self._take(record)
        for name, follower in self._logs.items():
            for line in follower.lines():
                if " WARNING " in line or " ERROR " in line:
                    self.console.print_line(f"{name:>12} │ ", line, style="yellow")
        if time.monotonic() >= self._next_draw:
            self._next_draw = time.monotonic() + 0.25
            self._live.update(self._render(), refresh=True)

    def close(self) -> None:
        self.tick()
        self._live.update(self._render(), refresh=True)
        self._live.stop()

    def _take(self, line: dict[str, Any]) -> None:
        self._watch.take(line)
        if "eval/reward" in line:
            self.held_out[line["step"]] = line["eval/reward"]
        elif line["process"] == "orchestrator" and "reward/mean" in line:
            self.orchestrator = line
            self.rewards.append(line["reward/mean"])
        elif line["process"] == "trainer":
            self.trainer = line
            self.first_step_at = self.first_step_at or time.monotonic()

    def _time_left(self) -> str:
        done = self.trainer.get("step", self.start_step) - self.start_step
        if self.first_step_at is None or done < 2:
            return "–"
        per_step = (time.monotonic() - self.first_step_at) / (done - 1)
        return _clock(per_step * (self.max_steps - self.start_step - done))

    def _render(self) -> Group:
        step = self.trainer.get("step", self.start_step)
        if not self.trainer:
            waiting = "starting" if not self.held_out else "first batch"
            return Group(Text(f"{waiting} … {_clock(time.monotonic() - self.started)}", style="dim"))
        width = min(WIDTH, self.console.width)
        bar = Table.grid()
        bar.add_row(ProgressBar(total=self.max_steps, completed=step, width=width))
        findings = [Text(str(finding), style=FINDING_STYLES[finding.severity]) for finding in self._watch.current]
        # Columns: what does not fit goes to another line, whole.
        numbers = Columns([Text.from_markup(number) for number in self._numbers(step)], padding=(0, 2))
        return Group(numbers, bar, Text(sparkline(self.rewards, width), style="green"), *findings)

    def _numbers(self, step: int) -> Iterator[str]:
        yield f"[bold]step[/] {step}/{self.max_steps}"
        if self.rewards:
            yield f"[bold]reward[/] {self.rewards[-1]:.3f}"
        if self.held_out:
            version, reward = list(self.held_out.items())[-1]
            yield f"[bold]held out[/] {reward:.3f} at {version}"
        yield f"[bold]staleness[/] {self.orchestrator.get('staleness/max', 0)}"
        yield f"[bold]tokens/s[/] {self.orchestrator.get('tokens_per_s', 0):,.0f}"
        yield f"[bold]left[/] {self._time_left()}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


def make_view(
    console: Console, show: str, plans: list[ProcessPlan], run_dir: RunDir, start_step: int, max_steps: int
) -> RunView:
    if show == "live" or (show == "auto" and console.is_terminal):
        return LiveDisplay(console, plans, run_dir, start_step, max_steps)
    return LogLines(console, plans)


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
