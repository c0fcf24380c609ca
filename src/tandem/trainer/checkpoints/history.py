"""Checkpoints on disk: which are complete, which is the newest, which may go, and what lies beyond. No torch.

checkpoints/step_000012/trainer/            what the trainer needs to continue after that step
checkpoints/step_000012/orchestrator.json   what the orchestrator needs; it came with the batch of that step
checkpoints/step_000012/manifest.json       written last, over all of it
"""

import logging
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.config.shared import CheckpointConfig
from tandem.utils.errors import UserError
from tandem.utils.files import keep_lines, read_json_lines, remove
from tandem.utils.manifest import MANIFEST, DamagedFiles, verify_manifest
from tandem.utils.metrics import parse_metrics_line
from tandem.utils.run_content import unfinished
from tandem.utils.run_dir import RunDir, step_name, step_of, step_of_samples, steps_with
from tandem.weights.versions import withdraw

logger = logging.getLogger(__name__)

TRAINER = "trainer"
# A checkpoint on its way out: no longer a step, and swept up with everything else that is temporary.
REMOVED = ".removed.tmp"


def newest_checkpoint(run_dir: RunDir) -> int | None:
    """The newest complete and undamaged checkpoint; others that are newer are named and passed over."""
    for step in reversed(_steps(run_dir.checkpoints)):
        folder = run_dir.checkpoints / step_name(step)
        try:
            verify_manifest(folder, step)
        except DamagedFiles as error:
            logger.warning("checkpoint %s is skipped: %s", folder, error)
            continue
        return step
    return None


def how_to_go_on(run_dir: RunDir, command: str) -> str:
    """Of a run that was stopped: its newest checkpoint, and what to type to go on from there."""
    complete = steps_with(run_dir.checkpoints, MANIFEST)
    if not complete:
        return "there is no checkpoint yet: start the run again with --clean"
    newest = run_dir.checkpoints / step_name(complete[-1])
    return f"the newest checkpoint is {newest}; continue with: {command} --resume {shlex.quote(str(run_dir.root))}"


def require_checkpoint(run_dir: RunDir) -> int:
    """The newest complete checkpoint, or UserError: there is nothing to resume."""
    step = newest_checkpoint(run_dir)
    if step is None:
        raise UserError(
            f"resume: output_dir = {str(run_dir.root)!r} holds no complete checkpoint; start again with --clean"
        )
    return step


def refuse_fewer_steps(run_dir: RunDir, step: int, max_steps: int) -> None:
    """UserError where a run that goes on from `step` would be over before."""
    if step > max_steps:
        raise UserError(
            f"resume: the run in output_dir = {str(run_dir.root)!r} is at step {step}, but max_steps = {max_steps}; "
            "raise max_steps to continue"
        )


def choose_checkpoint(run_dir: RunDir, step: int | None) -> int:
    """The complete checkpoint of `step`, or the newest; UserError if there is none."""
    complete = steps_with(run_dir.checkpoints, MANIFEST)
    if not complete:
        raise UserError(f"run_dir = {str(run_dir.root)!r} holds no complete checkpoint")
    if step is None:
        return require_checkpoint(run_dir)
    try:
        verify_manifest(run_dir.checkpoints / step_name(step), step)
    except DamagedFiles as error:
        nearest = min(complete, key=lambda found: abs(found - step))
        raise UserError(f"step = {step}: {error}; the nearest complete checkpoint is of step {nearest}") from error
    return step


def superseded(complete: Sequence[int], config: CheckpointConfig) -> list[int]:
    """Of the complete steps, in order, those that need not stay: neither among the last nor kept for good."""
    return [
        step for step in complete[: -config.keep_last] if config.keep_every is None or step % config.keep_every != 0
    ]


def remove_superseded(run_dir: RunDir, newest: int, config: CheckpointConfig) -> None:
    """Delete what `newest` makes unnecessary, once it is known to be whole; unfinished older ones go as well."""
    complete = [step for step in steps_with(run_dir.checkpoints, MANIFEST) if step <= newest]
    unfinished = [step for step in _steps(run_dir.checkpoints) if step < newest and step not in complete]
    steps = superseded(complete, config) + unfinished
    if not steps:
        return
    verify_manifest(run_dir.checkpoints / step_name(newest), newest)
    for step in steps:
        path = run_dir.checkpoints / step_name(step)
        # Renamed first: half of a deleted checkpoint must not be taken for one.
        removed = path.with_name(f".{path.name}{REMOVED}")
        shutil.rmtree(removed, ignore_errors=True)  # of a deletion that was cut short
        path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def last_events(run_dir: RunDir, processes: Sequence[str]) -> list[dict[str, Any]]:
    """What each of them last said: that it was started, finished or stopped; {}: nothing."""
    last: dict[str, dict[str, Any]] = {}
    for event in read_json_lines(run_dir.events):
        if event.get("event") in ("started", "finished", "stopped"):
            last[str(event.get("process"))] = event
    return [last.get(process, {}) for process in processes]


def is_end(event: Mapping[str, Any], max_steps: int) -> bool:
    """Whether it says that a run of this length is finished."""
    return event.get("event") == "finished" and event.get("step") == max_steps


def is_finished(run_dir: RunDir, processes: Sequence[str], max_steps: int) -> bool:
    """Whether all of them have said so of this length since they were last started, and the weights are whole."""
    if not all(is_end(event, max_steps) for event in last_events(run_dir, processes)):
        return False
    try:
        verify_manifest(run_dir.weights / step_name(max_steps), max_steps)
    except DamagedFiles:
        return False
    return True


def rewind(run_dir: RunDir, step: int) -> list[str]:
    """Delete what was written after `step`, so that a resumed run cannot meet it. Returns the names."""
    withdraw(run_dir.weights)
    removed = [
        f"{folder.name}/{name}"
        for folder in (run_dir.rollouts, run_dir.weights, run_dir.checkpoints)
        for name in _remove_after(folder, step, step_of)
    ]
    counts = {
        f"files of {run_dir.samples_folder.name}": len(_remove_after(run_dir.samples_folder, step, step_of_samples)),
        f"lines of {run_dir.metrics.name}": drop_lines_after(run_dir.metrics, step),
    }
    return removed + [f"{count} {what}" for what, count in counts.items() if count]


def _remove_after(folder: Path, step: int, step_in: Callable[[Path], int | None]) -> list[str]:
    """What belongs to a later step by its name, and what was not finished. Returns the names."""
    removed, begun = [], unfinished(folder)
    for path in sorted(folder.iterdir()) if folder.exists() else []:
        found = step_in(path)
        if (found is not None and found > step) or path in begun:
            remove(path)
            removed.append(path.name)
    return removed


def prepare_run(run_dir: RunDir, *, resume: bool, clean: bool) -> int:
    """Make the directory ready for a run of one command: emptied, or taken back to where it goes on from.

    Returns the step it goes on from; 0 for a new run.
    """
    if clean:
        run_dir.clean()
    step = 0
    if resume:
        step = require_checkpoint(run_dir)
        for name in rewind(run_dir, step):
            logger.info("resume: removed %s, which came after step %d", name, step)
    run_dir.create()
    return step


def drop_lines_after(path: Path, step: int, process: str | None = None) -> int:
    """Leave out the lines of later steps, of all processes or one: they will be written again. Lines that are damaged
    or cut short go as well."""

    def choose(lines: list[bytes]) -> list[bytes]:
        records = [parse_metrics_line(line) if line.endswith(b"\n") else None for line in lines]
        if (num_damaged := records.count(None)) > 0:
            logger.warning("%s: %d damaged lines are removed", path, num_damaged)
        pairs = zip(lines, records, strict=True)
        return [line for line, record in pairs if record is not None and not is_to_come(record)]

    def is_to_come(record: Mapping[str, Any]) -> bool:
        return record["step"] > step and process in (None, record["process"])

    return keep_lines(path, choose)


def start_step(run_dir: RunDir, process: str, *, resume: bool, own_folder: str, marker: str) -> int:
    """The step that `process` goes on from, whether it was started by hand or by `rl`; 0 for a new run.

    `own_folder` is where it publishes: what lies there beyond the starting point would be taken for this run's, so it
    is refused. (`rl` has removed it.) Its lines in metrics.jsonl of a step that it was killed in, before it published,
    are removed.
    """
    root, newest = str(run_dir.root), newest_checkpoint(run_dir)
    if resume and newest is None:
        raise UserError(f"resume: output_dir = {root!r} holds no complete checkpoint; start again without --resume")
    step = newest if resume and newest is not None else 0
    beyond = [found for found in steps_with(run_dir.root / own_folder, marker) if found > step]
    if beyond:
        told = (
            f"output_dir = {root!r} holds {own_folder} up to step {beyond[-1]}, but this run starts after step {step}"
        )
        if not resume and newest is not None:
            raise UserError(f"{told}; go on after step {newest} with `{process} --resume`, or give another output_dir")
        removed, again = (
            f"{own_folder} of steps {beyond[0]} to {beyond[-1]}",
            "both with --resume" if resume else "again",
        )
        raise UserError(
            f"{told}; end trainer and orchestrator, remove {removed}, and start {again}; or give another output_dir"
        )
    drop_lines_after(run_dir.metrics, step, process)
    if resume:
        logger.info("resuming after step %d", step)
    return step


def _steps(folder: Path) -> list[int]:
    """All steps below `folder`, finished or not, in order."""
    found = [step_of(path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted(step for step in found if step is not None)
