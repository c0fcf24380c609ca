"""The runs of a sweep handed to SLURM, as one array or one by one, and none of them twice."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.launch.slurm.client import require_slurm, submit
from tandem.launch.slurm.job import as_pattern, sbatch_lines
from tandem.launch.sweep.folder import EVALUATION, LOCK, SCRIPT, Run, store_jobs
from tandem.launch.sweep.states import UNFINISHED, progress_of
from tandem.utils.files import locked, write_atomic

# Options of a job script that are its own, and not those of the array.
OWN = ("job-name", "output", "error")


@dataclass(frozen=True)
class Submitted:
    """By the names of the runs: these, and evaluations of runs that were finished."""

    runs: list[str]
    evaluations: list[str]


def submit_runs(output_dir: Path, runs: Sequence[Run], *, resume: bool, array: bool, max_jobs: int | None) -> Submitted:
    """Submit what was never submitted or, with `resume`, what was stopped or failed."""
    require_slurm()
    wanted = UNFINISHED if resume else ("written",)
    with locked(output_dir / LOCK):
        items = progress_of(output_dir, runs)
        chosen = [item.run for item in items if item.state in wanted]
        evaluated = [item.run for item in items if item.evaluation in wanted]
        for run in evaluated:
            store_jobs(output_dir, "evaluation", {run.name: submit(run.evaluation_script)})
        if array:
            for number, group in enumerate(_alike(chosen)):
                _submit_array(output_dir, group, number, max_jobs)
        else:
            for run in chosen:
                _submit_one(output_dir, run)
    return Submitted([run.name for run in chosen], [run.name for run in evaluated])


def _submit_one(output_dir: Path, run: Run) -> None:
    job = submit(run.script)
    store_jobs(output_dir, "run", {run.name: job})
    if run.evaluates:
        after = submit(run.evaluation_script, [f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes"])
        store_jobs(output_dir, "evaluation", {run.name: after})


def _alike(runs: Sequence[Run]) -> list[list[Run]]:
    """Runs whose jobs ask for the same: an array has one header for all of its tasks."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(_header(run.script)), []).append(run)
    return list(groups.values())


def _header(script: Path) -> list[str]:
    lines = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    return [line for line in lines if not line.startswith(tuple(f"#SBATCH --{name}=" for name in OWN))]


def _submit_array(output_dir: Path, runs: Sequence[Run], number: int, max_jobs: int | None) -> None:
    limit = "" if max_jobs is None else f"%{max_jobs}"
    tasks = [f"--array=0-{len(runs) - 1}{limit}"]
    job = submit(_write_array(output_dir, runs, SCRIPT, f"array_{number}.sh"), tasks)
    store_jobs(output_dir, "run", {run.name: f"{job}_{index}" for index, run in enumerate(runs)})
    if runs[0].evaluates:
        script = _write_array(output_dir, runs, EVALUATION, f"array_{number}_evaluate.sh")
        # Each task waits for the one of the same number.
        after = submit(script, [*tasks, f"--dependency=aftercorr:{job}", "--kill-on-invalid-dep=yes"])
        store_jobs(output_dir, "evaluation", {run.name: f"{after}_{index}" for index, run in enumerate(runs)})


def _write_array(output_dir: Path, runs: Sequence[Run], script: str, name: str) -> Path:
    """A script that runs one of others by the number of its task; each prints into its own folder."""
    own = {"job-name": output_dir.name, "output": f"{as_pattern(output_dir / name.removesuffix('.sh'))}-%A_%a.out"}
    header = [*(f"#SBATCH {line}" for line in sbatch_lines(own)), *_header(Path(runs[0].folder) / script)]
    folders = "\n".join(f"  {shlex.quote(run.folder)}" for run in runs)
    text = f"""#!/bin/bash
{chr(10).join(header)}
# Task n runs the n-th of these; what it prints is in its folder.
folders=(
{folders}
)
folder=${{folders[$SLURM_ARRAY_TASK_ID]}}
exec bash "$folder"/{script} >> "$folder"/slurm-$SLURM_JOB_ID.out 2>&1
"""
    path = output_dir / name
    write_atomic(path, text.encode())
    return path
