"""How far each run of a sweep is, from its files and from SLURM's queue; and its last metrics."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tandem.launch.slurm.commands import jobs_under_way
from tandem.launch.sweep.folder import Run, read_jobs
from tandem.trainer.checkpoints.history import is_end, last_events
from tandem.utils.errors import file_damage
from tandem.utils.files import is_number, read_json
from tandem.utils.metrics import read_metrics
from tandem.utils.progress import reported
from tandem.utils.run_content import misshapen
from tandem.utils.run_dir import RunDir
from tandem.utils.run_holder import read_holder

logger = logging.getLogger(__name__)

# A run that was stopped has saved its last step: it was told to end by `scancel`, a time limit or Ctrl-C.
State = Literal["written", "pending", "running", "finished", "stopped", "failed", "damaged"]
UNFINISHED = ("stopped", "failed")  # which `--resume` goes on with
PROCESSES = {"rl": ("orchestrator", "trainer"), "sft": ("sft",), "align": ("align",)}
# What is shown of a run, the most telling first.
METRICS = {
    "rl": ("eval/reward", "reward/mean"),
    "sft": ("eval/loss", "loss"),
    "align": ("eval/accuracy", "eval/loss", "accuracy", "loss"),
}


@dataclass(frozen=True)
class Progress:
    run: Run
    state: State
    step: int
    max_steps: int | None
    metrics: Mapping[str, float]  # the last value of each
    job: str = ""
    evaluation: State | None = None  # None: it has none, or comes when the run is finished
    damage: str = ""  # what of a damaged run cannot be read


def progress_of(output_dir: Path, runs: Sequence[Run]) -> list[Progress]:
    jobs = read_jobs(output_dir)
    under_way = jobs_under_way() if jobs else {}
    looked_at = reported(runs, "sweep", "runs looked at")
    return [_progress(run, jobs.get(run.name, {}), under_way) for run in looked_at]


def _progress(run: Run, jobs: Mapping[str, str], under_way: Mapping[str, str]) -> Progress:
    if (damage := misshapen(run.directory)) is not None:
        return Progress(run, "damaged", 0, None, {}, damage=damage)
    max_steps = _max_steps(run)
    try:
        lines = read_metrics(RunDir(run.directory))
        state = _state(run, jobs.get("run", ""), under_way, max_steps)
    except OSError as error:
        return Progress(run, "damaged", 0, max_steps, {}, damage=file_damage(error))
    return Progress(
        run=run,
        state=state,
        step=max((line["step"] for line in lines), default=0),
        max_steps=max_steps,
        metrics=last_metrics(run, lines),
        job=jobs.get("run", ""),
        evaluation=_evaluation(run, jobs.get("evaluation", ""), under_way) if state == "finished" else None,
    )


def _evaluation(run: Run, job: str, under_way: Mapping[str, str]) -> State | None:
    if not run.evaluates:
        return None
    if run.results.exists():
        return "finished"
    if job in under_way:
        return "running" if under_way[job] == "running" else "pending"
    return "failed" if job or run.results.parent.exists() else "written"


def _state(run: Run, job: str, under_way: Mapping[str, str], max_steps: int | None) -> State:
    last = last_events(RunDir(run.directory), PROCESSES[run.command])
    if max_steps is not None and all(is_end(event, max_steps) for event in last):
        return "finished"
    if job in under_way:
        return "running" if under_way[job] == "running" else "pending"
    holder = read_holder(run.directory / "trainer.lock")
    if holder is not None and (holder.is_alive() if holder.is_on_this_machine() else not job):
        return "running"
    if any(event.get("event") == "stopped" for event in last):
        return "stopped"
    return "failed" if job or run.directory.exists() else "written"


def last_metrics(run: Run, lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    found = {name: line[name] for line in lines for name in METRICS[run.command] if is_number(line.get(name))}
    if run.evaluates and run.results.exists():
        try:
            found["evaluation/reward"] = float(read_json(run.results)["results"][-1]["scores"]["reward"])
        except (OSError, ValueError, LookupError, TypeError) as error:
            logger.warning("%s is damaged and left out: %s", run.results, error)
    return {name: found[name] for name in (*METRICS[run.command], "evaluation/reward") if name in found}


def _max_steps(run: Run) -> int | None:
    """As the run itself has computed it; None before it begins."""
    try:
        return int(read_json(RunDir(run.directory).config / f"{run.command}.json")["max_steps"])
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None
