"""What a user sees while a run goes on: a live display on a terminal, prefixed log lines elsewhere."""

import time
from typing import Any, Protocol

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tandem.launch.curve import sparkline
from tandem.launch.plan import ProcessPlan
from tandem.utils.console import Console
from tandem.utils.files import Follower
from tandem.utils.findings import Watch
from tandem.utils.metrics import parse_metrics_line, read_metrics
from tandem.utils.run_dir import RunDir

STYLES = {"inference": "cyan", "orchestrator": "green", "trainer": "magenta"}
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
                prefix = Text(f"{name:>12} │ ", style=STYLES.get(name.partition("_")[0], ""))
                self.console.print(prefix + Text(line), soft_wrap=True, highlight=False)

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
                    self.console.print(Text(f"{name:>12} │ {line}", style="yellow"), soft_wrap=True)
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
        table = Table.grid(padding=(0, 2))
        held_out = list(self.held_out.items())
        cells = (
            f"[bold]step[/] {step}/{self.max_steps}",
            f"[bold]reward[/] {self.rewards[-1]:.3f}" if self.rewards else "",
            f"[bold]held out[/] {held_out[-1][1]:.3f} at {held_out[-1][0]}" if held_out else "",
            f"[bold]staleness[/] {self.orchestrator.get('staleness/max', 0)}",
            f"[bold]tokens/s[/] {self.orchestrator.get('tokens_per_s', 0):,.0f}",
            f"[bold]left[/] {self._time_left()}",
        )
        table.add_row(*map(Text.from_markup, cells))
        bar = Table.grid()
        bar.add_row(ProgressBar(total=self.max_steps, completed=step, width=60))
        findings = [Text(str(finding), style=FINDING_STYLES[finding.severity]) for finding in self._watch.current]
        return Group(table, bar, Text(sparkline(self.rewards, width=60), style="green"), *findings)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes}:{seconds:02d}"


def make_view(
    console: Console, show: str, plans: list[ProcessPlan], run_dir: RunDir, start_step: int, max_steps: int
) -> RunView:
    if show == "live" or (show == "auto" and console.is_terminal):
        return LiveDisplay(console, plans, run_dir, start_step, max_steps)
    return LogLines(console, plans)
