"""metrics.jsonl and events.jsonl, and the forwarding of metrics to the trackers people use.

Every process appends to the same two files of the run directory: they are the truth. The process
that owns the run (the orchestrator, or `sft`) also forwards new metric lines to TensorBoard, W&B
or trackio, so that one run shows up there once, whoever wrote the line. It also applies the rules of utils.findings
to every line.
"""

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from tandem.utils.errors import UserError, shorten
from tandem.utils.files import Follower, append_json_line, parse_json_line, read_json_lines, write_atomic
from tandem.utils.findings import Finding, Watch
from tandem.utils.run_content import WANDB_ID, wandb_id
from tandem.utils.run_dir import RunDir
from tandem.utils.secrets import hidden

logger = logging.getLogger(__name__)

Number = int | float
LINE_KEYS = ("time", "process", "step")  # of every line of metrics.jsonl; the others are metrics
GAVE_UP = "gave_up"  # the event of a process that failed for a reason that starting it again would not mend


class RunLog:
    """Appends the metrics and events of one process; of several that do the same, all but one are not enabled."""

    def __init__(self, run_dir: RunDir, process: str, *, enabled: bool = True) -> None:
        self.run_dir = run_dir
        self.process = process
        self.enabled = enabled

    def metrics(self, step: int, values: Mapping[str, Number]) -> None:
        self._append(self.run_dir.metrics, {"step": step, **values})

    def event(self, name: str, **details: Any) -> None:
        shown = {key: shorten(value) if isinstance(value, str) else value for key, value in details.items()}
        self._append(self.run_dir.events, {"event": name, **shown})

    def _append(self, path: Path, values: Mapping[str, Any]) -> None:
        if self.enabled:
            append_json_line(path, {"time": time.time(), "process": self.process, **values})


def parse_metrics_line(line: bytes | str) -> dict[str, Any] | None:
    """A line of metrics.jsonl with its step and its process; None if it is damaged."""
    record = parse_json_line(line)
    return record if record is not None and _is_metrics(record) else None


def _is_metrics(record: Mapping[str, Any]) -> bool:
    return type(record.get("step")) is int and isinstance(record.get("process"), str)


def read_metrics(run_dir: RunDir) -> list[dict[str, Any]]:
    """All lines of metrics.jsonl but damaged ones."""
    return [line for line in read_json_lines(run_dir.metrics) if _is_metrics(line)]


def rows_by_step(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of all processes as one row a step, in order. A name that several processes give is a column for each
    of them, as in trainer/tokens_per_s. Of lines that say the same of a step, the last counts: a run that was resumed
    did the step again."""
    givers: dict[str, set[str]] = {}
    for line in lines:
        for name in line.keys() - set(LINE_KEYS):
            givers.setdefault(name, set()).add(line["process"])
    rows: dict[int, dict[str, Any]] = {}
    for line in lines:
        row = rows.setdefault(line["step"], {"step": line["step"]})
        for name, value in line.items():
            if name not in LINE_KEYS:
                row[name if len(givers[name]) == 1 else f"{line['process']}/{name}"] = value
    return [rows[step] for step in sorted(rows)]


class Tracker(Protocol):
    """Somewhere metrics are shown."""

    def log(self, step: int, values: Mapping[str, Number]) -> None: ...

    def close(self) -> None: ...


class TensorBoardTracker:
    """A resumed run writes next to the first start's file; what that has of later steps is not shown any more."""

    def __init__(self, run_dir: RunDir, config: Mapping[str, Any], start_step: int) -> None:
        from tensorboardX import SummaryWriter  # pyright: ignore[reportMissingImports]

        purge_step = start_step + 1 if start_step else None
        self._writer = SummaryWriter(str(run_dir.root / "tensorboard"), purge_step=purge_step)
        self._writer.add_text("config", f"```json\n{json.dumps(config, indent=2)}\n```", start_step)

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbTracker:
    """One W&B run, also of a run that is resumed; every line is a row of its own, drawn over the `step` column,
    since steps of the trainer and the orchestrator arrive interleaved."""

    def __init__(
        self, run_dir: RunDir, project: str, name: str, mode: str, config: Mapping[str, Any], start_step: int
    ) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        if mode == "offline":
            os.environ["WANDB_ERROR_REPORTING"] = "false"  # its crash reports would leave the machine
        self._run = wandb.init(
            project=project,
            name=name,
            id=_wandb_id(run_dir, is_new=start_step == 0),
            resume="allow",
            config=dict(config),
            dir=os.environ.get("WANDB_DIR") or str(run_dir.root),
            mode=mode,  # pyright: ignore[reportArgumentType]
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


def _wandb_id(run_dir: RunDir, *, is_new: bool) -> str:
    """The name by which W&B knows the run, kept in the run directory."""
    known_as = None if is_new else wandb_id(run_dir.root)
    if known_as is None:
        known_as = secrets.token_hex(4)
        write_atomic(run_dir.config / WANDB_ID, known_as.encode())
    return known_as


class TrackioTracker:
    """A resumed run is found by its name."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], start_step: int) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        resume = "allow" if start_step else "never"
        self._run = trackio.init(project=project, name=name, config=dict(config), resume=resume, embed=False)

    def log(self, step: int, values: Mapping[str, Number]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


TRACKER_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "trackio": "trackio"}


def refuse_missing_trackers(report_to: Sequence[str]) -> None:
    """A tracker whose package is not installed is refused before anything starts."""
    for tracker in report_to:
        if find_spec(TRACKER_PACKAGES[tracker]) is None:
            raise UserError(
                f"metrics.report_to names {tracker!r}, but the package {TRACKER_PACKAGES[tracker]!r} is not "
                f"installed; install it with: pip install 'tandem-rl[{tracker}]'"
            )


class MetricsForwarder:
    """Follows metrics.jsonl: hands each new line to the trackers, and logs what the rules find, once each. One that is
    not enabled does nothing."""

    def __init__(self, run_dir: RunDir, trackers: Sequence[Tracker] = (), *, enabled: bool = True) -> None:
        self.run_dir = run_dir
        self._trackers = trackers
        self._enabled = enabled
        # A resumed run goes on where the file ends: earlier lines were forwarded by the first start.
        self._watch = Watch(read_metrics(run_dir) if enabled else ())
        self._follower = Follower(run_dir.metrics, from_end=True)

    @property
    def findings(self) -> list[Finding]:
        """Of now."""
        return self._watch.current

    @property
    def remarks(self) -> str:
        """The same as the end of a step's line."""
        return "".join(f"; {finding.message}" for finding in self.findings if finding.severity != "note")

    def forward(self) -> None:
        """Hand over the lines that have come since the last call."""
        if not self._enabled:
            return
        for line in self._follower.lines():
            record = parse_metrics_line(line)
            if record is None:
                logger.warning("a damaged line of %s is not forwarded", self._follower.path)
                continue
            process, step = record["process"], record["step"]
            values = {
                f"{process}/{name}": value
                for name, value in record.items()
                if name not in LINE_KEYS and isinstance(value, Number)
            }
            for tracker in self._trackers:
                tracker.log(step, values)
            for finding in self._watch.take(record):
                level = logging.INFO if finding.severity == "note" else logging.WARNING
                logger.log(level, "step %d: %s", step, finding)
                RunLog(self.run_dir, process).event("finding", step=step, **asdict(finding))

    def close(self) -> None:
        self.forward()
        for tracker in self._trackers:
            tracker.close()


def open_forwarder(
    run_dir: RunDir,
    *,
    report_to: Sequence[str],
    project: str | None,
    run_name: str | None,
    wandb_mode: str | None,
    config: Mapping[str, Any],
    start_step: int = 0,
    enabled: bool = True,
) -> MetricsForwarder:
    """Start the trackers that `report_to` names and forward to them; if not enabled, to none.

    What is left out is as W&B's own variables say. They are told the run's configuration; with a `start_step`, they go
    on with the run they know.
    """
    project = project or os.environ.get("WANDB_PROJECT") or "tandem"
    name = run_name or os.environ.get("WANDB_NAME") or run_dir.root.resolve().name
    wandb_mode = wandb_mode or os.environ.get("WANDB_MODE") or "online"
    told = hidden(config)
    openers: dict[str, Callable[[], Tracker]] = {
        "tensorboard": lambda: TensorBoardTracker(run_dir, told, start_step),
        "wandb": lambda: WandbTracker(run_dir, project, name, wandb_mode, told, start_step),
        "trackio": lambda: TrackioTracker(project, name, told, start_step),
    }
    trackers = [openers[tracker]() for tracker in report_to if enabled]
    return MetricsForwarder(run_dir, trackers, enabled=enabled)
