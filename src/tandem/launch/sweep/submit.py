"""The runs of a sweep handed to SLURM, as one array or one by one, and none of them twice."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from tandem.launch.slurm.client import require_slurm, submit
from tandem.launch.sweep.folder import EVALUATION, SCRIPT, Run, alone, store_job
from tandem.launch.sweep.states import Progress, progress_of
from tandem.utils.files import write_atomic

# Options of a job script that are its own, and not those of the array.
OWN = ("job-name", "output", "error")


def submit_runs(output_dir: Path, runs: Sequence[Run], *, resume: bool, array: bool, max_jobs: int | None) -> list[str]:
    """Submit what was never submitted or, with `resume`, what failed. Returns the names."""
    require_slurm()
    with alone(output_dir):
        chosen = [item.run for item in progress_of(output_dir, runs) if _is_chosen(item, resume)]
        if array:
            for number, group in enumerate(_alike(chosen)):
                _submit_array(output_dir, group, number, max_jobs)
        else:
            for run in chosen:
                _submit_one(output_dir, run)
    return [run.name for run in chosen]


def _is_chosen(item: Progress, resume: bool) -> bool:
    return item.state == "failed" if resume else item.state == "written"


def _submit_one(output_dir: Path, run: Run) -> None:
    job = submit(run.script)
    store_job(output_dir, run.name, run=job)
    if run.evaluates:
        after = submit(Path(run.folder) / EVALUATION, [f"--dependency=afterok:{job}", "--kill-on-invalid-dep=yes"])
        store_job(output_dir, run.name, evaluation=after)


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
    for index, run in enumerate(runs):
        store_job(output_dir, run.name, run=f"{job}_{index}")
    if runs[0].evaluates:
        script = _write_array(output_dir, runs, EVALUATION, f"array_{number}_evaluate.sh")
        # Each task waits for the one of the same number.
        after = submit(script, [*tasks, f"--dependency=aftercorr:{job}", "--kill-on-invalid-dep=yes"])
        for index, run in enumerate(runs):
            store_job(output_dir, run.name, evaluation=f"{after}_{index}")


def _write_array(output_dir: Path, runs: Sequence[Run], script: str, name: str) -> Path:
    """A script that runs one of others by the number of its task; each prints into its own folder."""
    header = _header(Path(runs[0].folder) / script)
    folders = "\n".join(f"  {shlex.quote(run.folder)}" for run in runs)
    text = f"""#!/bin/bash
#SBATCH --job-name={output_dir.name}
#SBATCH --output={output_dir}/{name.removesuffix(".sh")}-%A_%a.out
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
