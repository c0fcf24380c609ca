"""The runs of a sweep handed to SLURM, as arrays or one by one, and none of them twice."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tandem.launch.slurm.commands import max_array_size, require_slurm, submit
from tandem.launch.slurm.job import as_pattern, sbatch_lines, usual_output
from tandem.launch.sweep.folder import EVALUATION, LOCK, SCRIPT, Run, store_jobs
from tandem.launch.sweep.states import UNFINISHED, progress_of
from tandem.utils.files import locked, write_atomic


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
            before = None
            for number, group in enumerate(_arrays(chosen, max_array_size())):
                before = _submit_array(output_dir, group, number, max_jobs, before)
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


def _arrays(runs: Sequence[Run], max_tasks: int) -> list[list[Run]]:
    """Runs whose jobs ask for the same, as an array has one header for all of its tasks; no more than it may have."""
    groups: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault(tuple(_header(run, SCRIPT)), []).append(run)
    return [group[first : first + max_tasks] for group in groups.values() for first in range(0, len(group), max_tasks)]


def _header(run: Run, script: str) -> list[str]:
    """That of its script, but for the name of the run, and its folder where nothing says where to print."""
    text = (Path(run.folder) / script).read_text()
    (usual,) = sbatch_lines({"output": usual_output(Path(run.folder))})
    lines = [line for line in text.splitlines() if line.startswith("#SBATCH ") and line != f"#SBATCH {usual}"]
    before, _, after = (_value(lines, "job-name") or "").rpartition(f"-{run.name}")
    (name,) = sbatch_lines({"job-name": before + after})
    return [f"#SBATCH {name}" if line.startswith("#SBATCH --job-name=") else line for line in lines]


def _value(header: Sequence[str], option: str) -> str | None:
    given = [line.removeprefix(f"#SBATCH --{option}=") for line in header if line.startswith(f"#SBATCH --{option}=")]
    return shlex.split(given[-1])[0] if given else None


def _submit_array(output_dir: Path, runs: Sequence[Run], number: int, max_jobs: int | None, before: str | None) -> str:
    """`before`: another array, which comes first where the two together may not run more than `max_jobs`."""
    limit = "" if max_jobs is None else f"%{max_jobs}"
    tasks = [f"--array=0-{len(runs) - 1}{limit}"]
    after = []
    if max_jobs is not None and before is not None:
        own = _value(_header(runs[0], SCRIPT), "dependency")  # which the flag replaces
        after = [f"--dependency=afterany:{before}{f',{own}' if own else ''}"]
    job = submit(_write_array(output_dir, runs, SCRIPT, f"array_{number}.sh"), [*tasks, *after])
    store_jobs(output_dir, "run", {run.name: f"{job}_{index}" for index, run in enumerate(runs)})
    if runs[0].evaluates:
        script = _write_array(output_dir, runs, EVALUATION, f"array_{number}_evaluate.sh")
        # Each task waits for the one of the same number.
        evaluation = submit(script, [*tasks, f"--dependency=aftercorr:{job}", "--kill-on-invalid-dep=yes"])
        store_jobs(output_dir, "evaluation", {run.name: f"{evaluation}_{index}" for index, run in enumerate(runs)})
    return job


def _write_array(output_dir: Path, runs: Sequence[Run], script: str, name: str) -> Path:
    """A script that runs one of others by the number of its task; each prints into its own folder, unless `output` or
    `error` says where."""
    header, place = _header(runs[0], script), ""
    prints, fails = (_value(header, option) is not None for option in ("output", "error"))
    if not prints:
        output = f"{as_pattern(output_dir / name.removesuffix('.sh'))}-%A_%a.out"
        header = [*(f"#SBATCH {line}" for line in sbatch_lines({"output": output})), *header]
        place = f' >> "$folder"/slurm-$SLURM_JOB_ID.out{"" if fails else " 2>&1"}'
    folders = "\n".join(f"  {shlex.quote(run.folder)}" for run in runs)
    text = f"""#!/bin/bash
{chr(10).join(header)}
# Task n runs the n-th of these.
folders=(
{folders}
)
folder=${{folders[$SLURM_ARRAY_TASK_ID]}}
exec bash "$folder"/{script}{place}
"""
    path = output_dir / name
    write_atomic(path, text.encode())
    return path
