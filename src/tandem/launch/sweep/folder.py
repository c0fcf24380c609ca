"""The folder of a sweep: what is written before anything runs, and what is remembered of it.

output_dir/
  experiment.yaml   the experiment file as it was read
  runs.csv          a table of all runs: what tells them apart, their folders
  summary.txt       how many runs, what was computed, what names mean here
  sweep.json        the same for programs; jobs.json: the SLURM job of each run
  NAME/config.yaml  the configuration of one run, for `rl`, `sft` or `align`
  NAME/job.sh       its job script
  NAME/secrets.sh   keys that it exports, if there are any
  NAME/run/         its run directory
  results.csv results.svg    by --status, and at the end of every run

Files that hold a secret only the user can read.
"""

import csv
import io
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter

from tandem.commands.changes import Change
from tandem.commands.offline import OfflineConfig
from tandem.commands.rl import RLConfig
from tandem.config.slurm import SlurmConfig
from tandem.config.sources import Tree
from tandem.launch.slurm.commands import jobs_under_way
from tandem.launch.slurm.job import Job, make_log_folders, render
from tandem.launch.slurm.submission import with_servers
from tandem.launch.sweep.resolve import SubExperiment
from tandem.utils.errors import UserError
from tandem.utils.files import json_text, read_json, read_regular, read_table, write_atomic, write_json
from tandem.utils.progress import count_runs, reported
from tandem.utils.run_lock import refuse_unwritable
from tandem.utils.secrets import holds_secret

EXPERIMENT, SWEEP, JOBS, LOCK = "experiment.yaml", "sweep.json", "jobs.json", ".lock"
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # in C, where libyaml is there
JOBS_OF_RUNS = TypeAdapter(dict[str, dict[str, str]])
CONFIG, SCRIPT, EVALUATION, SECRETS = "config.yaml", "job.sh", "evaluate.sh", "secrets.sh"


@dataclass(frozen=True)
class Run:
    """One run as the folder remembers it."""

    name: str
    algorithm: str
    command: str
    folder: str
    varied: dict[str, Any]
    nodes: int
    evaluates: bool

    @property
    def directory(self) -> Path:
        return Path(self.folder) / "run"

    @property
    def script(self) -> Path:
        return Path(self.folder) / SCRIPT

    @property
    def evaluation_script(self) -> Path:
        return Path(self.folder) / EVALUATION

    @property
    def results(self) -> Path:
        """Of its evaluation."""
        return Path(self.folder) / "evaluation" / "results.json"


def write_sweep(output_dir: Path, experiment: Path, runs: Sequence[SubExperiment]) -> list[Run]:
    """Everything but the runs themselves. A run that has begun keeps its configuration: another one is refused."""
    jobs = read_jobs(output_dir)
    under_way = jobs_under_way() if jobs else {}
    for run in runs:
        if run.name in jobs or run.run.exists():
            _refuse_changed(run)
        for job in jobs.get(run.name, {}).values():
            if job in under_way:
                _refuse_rewriting(output_dir, run, job)
    with refuse_unwritable(output_dir, "execution.output_dir"):
        output_dir.mkdir(parents=True, exist_ok=True)
    is_private = any(run.secrets or holds_secret([run.tree, run.evaluation]) for run in runs)
    write_atomic(output_dir / EXPERIMENT, experiment.read_bytes(), private=is_private)
    for run in reported(runs, "sweep", "runs written"):
        _write_run(output_dir, run)
    kept = [Run(**_stored(run)) for run in runs]
    write_json(output_dir / SWEEP, {"runs": [asdict(run) for run in kept]})
    write_atomic(output_dir / "runs.csv", _table(kept).encode())
    write_atomic(output_dir / "summary.txt", _summary(output_dir, runs).encode())
    return kept


def _write_run(output_dir: Path, run: SubExperiment) -> None:
    if not run.secrets:
        (run.folder / SECRETS).unlink(missing_ok=True)
    for path, (content, is_private) in _files_of(output_dir, run).items():
        # Not flushed: `sweep` can write it again, and a sweep may have tens of thousands.
        write_atomic(path, content, flush=False, private=is_private)
    make_log_folders(run.slurm)


def _files_of(output_dir: Path, run: SubExperiment) -> dict[Path, tuple[bytes, bool]]:
    """All that the jobs of a run are made of, and whether only the user may read it."""
    job, servers = training_job(output_dir, run)
    texts = {CONFIG: (_config_text(run), holds_secret(run.tree)), SCRIPT: (render(job), False)}
    if run.secrets:
        lines = [f"export {name}={shlex.quote(value)}\n" for name, value in run.secrets.items()]
        texts[SECRETS] = ("".join(lines), True)
    if run.evaluation is not None:
        texts["evaluate.yaml"] = (_yaml(run.evaluation), holds_secret(run.evaluation))
        texts[EVALUATION] = (render(evaluation_job(output_dir, run)), False)
    files = {run.folder / name: (text.encode(), is_private) for name, (text, is_private) in texts.items()}
    return files | {path: (json_text(tree), holds_secret(tree)) for path, tree in servers.items()}


def _refuse_rewriting(output_dir: Path, run: SubExperiment, job: str) -> None:
    """A job that waits or runs reads these files when it starts, and when it is queued again."""
    for path, (content, _) in _files_of(output_dir, run).items():
        if not path.exists() or path.read_bytes() != content:
            raise UserError(
                f"run {run.name!r} waits or runs as job {job}, and {path.name} would change under it; wait for it, "
                f"cancel it (scancel {job}), or give the experiment another output_dir"
            )


def read_sweep(output_dir: Path) -> list[Run]:
    try:
        return [Run(**run) for run in read_json(output_dir / SWEEP)["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"there is no sweep in {output_dir} yet; `sweep FILE` writes it") from error


def read_jobs(output_dir: Path) -> dict[str, dict[str, str]]:
    """The SLURM jobs of each run by its name: `run`, and `evaluation` where there is one."""
    path = output_dir / JOBS
    if not os.path.lexists(path):
        return {}
    try:
        return JOBS_OF_RUNS.validate_python(read_table(path))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}, which names the SLURM jobs of the runs, is damaged; remove it when none of them waits or runs"
        ) from error


def store_jobs(output_dir: Path, kind: str, jobs: Mapping[str, str]) -> None:
    """`kind`: run or evaluation; `jobs` by the names of the runs."""
    stored = read_jobs(output_dir)
    write_json(output_dir / JOBS, stored | {name: stored.get(name, {}) | {kind: job} for name, job in jobs.items()})


def training_job(output_dir: Path, run: SubExperiment) -> tuple[Job, dict[Path, Tree]]:
    """The run directory is the sweep's own: whatever a job finds there, it continues. With the files of its servers."""
    report = ["python", "-m", "tandem.entrypoints.sweep", str(output_dir / EXPERIMENT), "--status"]
    config = run.config
    assert isinstance(config, RLConfig | OfflineConfig)
    job = Job(
        name=_job_name(output_dir, run),
        command=run.command,
        config_file=run.folder / CONFIG,
        folder=run.folder,
        slurm=run.slurm,
        run=run.run,
        save_timeout_s=config.checkpoint.on_signal_timeout_s,
        always_goes_on=True,
        environment=run.environment,
        secrets=run.folder / SECRETS if run.secrets else None,
        comment=[f"{run.algorithm}: {_told(run.variant.varied)}", f"Written by `sweep`; see {output_dir}/summary.txt"],
        after=[f"{shlex.join(report)} > /dev/null  # results.csv and results.svg"],
    )
    if isinstance(config, OfflineConfig):
        return job.changed(ranks_per_node=config.parallel.ranks), {}
    job, _, files = with_servers(job, config)
    return job, files


def evaluation_job(output_dir: Path, run: SubExperiment) -> Job:
    given = {name: value for name, value in run.slurm.sbatch.items() if name not in ("signal", "output", "error")}
    slurm = SlurmConfig.model_validate(given | {"nodes": 1, "venv": run.slurm.venv})
    report = ["python", "-m", "tandem.entrypoints.sweep", str(output_dir / EXPERIMENT), "--status"]
    return Job(
        name=f"{_job_name(output_dir, run)}-evaluate",
        command="evaluate",
        config_file=run.folder / "evaluate.yaml",
        folder=run.folder,
        slurm=slurm,
        environment=run.environment,
        secrets=run.folder / SECRETS if run.secrets else None,
        comment=[f"Evaluates the model of {run.name}"],
        after=[f"{shlex.join(report)} > /dev/null  # results.csv and results.svg"],
    )


def _job_name(output_dir: Path, run: SubExperiment) -> str:
    return f"{run.slurm.sbatch.get('job-name', output_dir.name)}-{run.name}"


def _stored(run: SubExperiment) -> dict[str, Any]:
    return {
        "name": run.name,
        "algorithm": run.algorithm,
        "command": run.command,
        "folder": str(run.folder),
        "varied": run.variant.varied,
        "nodes": run.slurm.nodes,
        "evaluates": run.evaluation is not None,
    }


def _refuse_changed(run: SubExperiment) -> None:
    """Of a run that has begun."""
    stored = run.folder / CONFIG
    if not stored.exists():
        return
    try:
        old, new = flatten(yaml.safe_load(read_regular(stored))), flatten(run.tree)
    except (ValueError, AttributeError, yaml.YAMLError) as error:
        raise UserError(
            f"{stored}, with which run {run.name!r} was started, is damaged; put it back, or delete {run.folder}"
        ) from error
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if changed:
        told = ", ".join(str(Change(key, old.get(key), new.get(key))) for key in changed[:3])
        raise UserError(
            f"run {run.name!r} was started with another configuration ({told}); give the experiment another "
            f"output_dir, or delete {run.folder}"
        )


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values by dotted path."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _config_text(run: SubExperiment) -> str:
    notes = "".join(f"# {note}\n" for note in run.notes)
    return f"# {run.command} @ {run.folder / CONFIG}\n{notes}{_yaml(run.tree)}"


def _yaml(tree: Tree) -> str:
    return yaml.dump(tree, Dumper=DUMPER, sort_keys=False, allow_unicode=True)


def _table(runs: Sequence[Run]) -> str:
    names = dict.fromkeys(name for run in runs for name in run.varied if name != "algorithm")
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["name", "algorithm", *names, "folder"])
    for run in runs:
        values = [run.varied.get(name, "") for name in names]
        writer.writerow([run.name, run.algorithm, *values, run.folder])
    return text.getvalue()


def _summary(output_dir: Path, runs: Sequence[SubExperiment]) -> str:
    lines = [f"{count_runs(len(runs))} in {output_dir}", ""]
    varied = {key: None for run in runs for key in run.variant.varied}
    for key in varied:
        values = dict.fromkeys(str(run.variant.varied[key]) for run in runs if key in run.variant.varied)
        lines.append(f"  {key}: {', '.join(values)}")
    notes = dict.fromkeys(note for run in runs for note in run.notes)
    lines += ["", "What names mean here, and what was computed:", *(f"  {note}" for note in notes)] if notes else []
    lines += ["", "Runs:", *(f"  {run.name}: {run.command} @ {run.folder / CONFIG}" for run in runs)]
    return "\n".join(lines) + "\n"


def _told(varied: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} = {value}" for key, value in varied.items()) or "the only run"
