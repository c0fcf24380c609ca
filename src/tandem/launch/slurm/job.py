"""A job script: one readable bash file that SLURM runs, or a person by hand.

The text is a template (templates/job.sh). A site puts others before it: a folder named by TANDEM_SLURM_TEMPLATES
with a job.sh that extends "tandem/job.sh" and says what differs.
"""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import jinja2

from tandem.config.sbatch import is_one_line
from tandem.config.slurm import SlurmConfig
from tandem.launch.slurm import srun
from tandem.utils.errors import UserError
from tandem.utils.run_lock import refuse_unwritable

TEMPLATES = Path(__file__).parent / "templates"
SITE_TEMPLATES = "TANDEM_SLURM_TEMPLATES"
JOB = "TANDEM_SLURM_JOB"  # set by the script: the job that a command is the work of; empty by hand
# c10d takes nodes for dead whose clocks differ, and starts the others without them.
RENDEZVOUS = "--rdzv-backend=static"
SRUN = f"python -m {srun.MODULE}"  # which lets what it runs end by itself, where srun would kill it
RESTARTED = '[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ]'


@dataclass(frozen=True)
class Job:
    """`command` with `config_file`, as a SLURM job."""

    name: str
    command: str  # rl, sft, align or evaluate
    config_file: Path
    folder: Path  # of the script and of what the job prints
    slurm: SlurmConfig
    run: Path | None = None  # the run directory, of a command that has one
    ranks_per_node: int = 1
    save_timeout_s: float = 25.0
    first: Sequence[str] = ()  # flags of the first start
    always_goes_on: bool = False  # the run directory belongs to the job: what is in there is continued at any start
    serving: int = 0  # nodes with inference servers
    servers_per_node: int = 1
    inference: Path | None = None  # the configuration of the servers
    delays_s: Sequence[float] = ()  # before each restart of a server that failed
    environment: Mapping[str, str] = field(default_factory=dict)
    secrets: Path | None = None  # a script that exports more, which only the user can read
    arguments: str = ""  # more of the command line, as the shell reads it
    comment: Sequence[str] = ()
    after: Sequence[str] = ()

    def changed(self, **values: Any) -> "Job":
        return replace(self, **values)

    @property
    def is_spread(self) -> bool:
        """Whether torchrun starts the command on every node; `rl` runs once, and spreads its trainer."""
        return self.slurm.nodes > 1 and self.command in ("sft", "align")


def in_job() -> bool:
    """Whether this process is the work of a job that one of our scripts runs in."""
    return bool(os.environ.get("SLURM_JOB_ID")) and os.environ.get(JOB) == os.environ.get("SLURM_JOB_ID")


def in_script() -> bool:
    """Whether one of our scripts has started this process, in a job or by hand."""
    return os.environ.get(JOB) == os.environ.get("SLURM_JOB_ID", "")


def render(job: Job) -> str:
    def quoted(path: Path | None) -> str:
        return "" if path is None else shlex.quote(str(path))

    context: dict[str, Any] = {
        "options": sbatch_lines(sbatch_options(job)),
        "comment": [" ".join(line.splitlines()) for line in job.comment],
        "folder": quoted(job.folder),
        "prints": shlex.quote(as_pattern(job.folder)),
        "directory": quoted(Path.cwd()),
        "venv": quoted(job.slurm.venv or _custom_environment()),
        "environment": [(name, shlex.quote(value)) for name, value in job.environment.items()],
        "secrets": quoted(job.secrets),
        "nodes": job.slurm.nodes,
        "serving": job.serving,
        "servers_per_node": job.servers_per_node,
        "inference": quoted(job.inference),
        "delays": [f"{delay_s:g}" for delay_s in job.delays_s],
        "run": quoted(job.run),
        "first": shlex.join(job.first),
        "goes_on": f"[ -e {quoted(job.run)}/config ]" if job.always_goes_on else RESTARTED,
        "command": command_line(job),
        "srun": SRUN,
        "after": list(job.after),
        "requeues": job.slurm.requeues is not False,
    }
    try:
        return (
            _templates(os.environ.get(SITE_TEMPLATES)).get_template("job.sh").render(context).replace("\n\n\n", "\n\n")
        )
    except jinja2.TemplateError as error:
        raise UserError(f"{SITE_TEMPLATES} = {os.environ.get(SITE_TEMPLATES)!r}: job.sh: {error}") from error


@cache
def _templates(site: str | None) -> jinja2.Environment:
    """Ours, and before them the site's. Its own may extend ours by the name tandem/job.sh. They are parsed once, which
    takes far longer than to fill them in."""
    ours = jinja2.FileSystemLoader(TEMPLATES)
    loaders: list[jinja2.BaseLoader] = [ours, jinja2.PrefixLoader({"tandem": ours})]
    if site:
        if not Path(site).is_dir():
            raise UserError(f"{SITE_TEMPLATES} = {site!r} is not a directory; put your job.sh into one and name it")
        loaders.insert(0, jinja2.FileSystemLoader(site))
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(loaders), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )


def command_line(job: Job) -> str:
    """What the script runs, over several lines where it is long."""
    module = f"tandem.entrypoints.{job.command}"
    given = f"@ {shlex.quote(str(job.config_file))}{job.arguments and ' '}{job.arguments}"
    if not job.is_spread:
        return f"python -m {module} {given}"
    nodes = job.slurm.nodes
    return (
        f"{SRUN} --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --kill-on-bad-exit=1 -- \\\n"
        f"  python -m torch.distributed.run --nnodes={nodes} --nproc-per-node={job.ranks_per_node} \\\n"
        f"  {RENDEZVOUS} --rdzv-endpoint=$TANDEM_RENDEZVOUS "
        f"--shutdown-timeout={shutdown_timeout(job.save_timeout_s)} \\\n"
        f"  -m {module} {given}"
    )


def shutdown_timeout(save_timeout_s: float) -> int:
    """How long torchrun gives its ranks to save a checkpoint."""
    return int(save_timeout_s) + 4


def sbatch_options(job: Job) -> dict[str, Any]:
    """What the user gave, and what is computed where nothing is given."""
    given = {name: value for name, value in job.slurm.sbatch.items() if name not in ("requeue", "no-requeue")}
    computed: dict[str, Any] = {
        "output": usual_output(job.folder),
        "open-mode": "append",  # a job that is queued again keeps its id
    }
    if job.slurm.nodes > 1:
        computed["ntasks-per-node"] = 1
    if job.run is not None:
        computed["signal"] = f"B:USR1@{job.slurm.signal_s}"
    if job.run is not None or job.slurm.requeues is not None:
        computed["no-requeue" if job.slurm.requeues is False else "requeue"] = True
    return {"job-name": job.name} | computed | given | {"job-name": job.name}


def sbatch_lines(options: Mapping[str, Any]) -> list[str]:
    """As they stand behind `#SBATCH`, where sbatch takes quotes as a shell does."""
    for name, value in options.items():
        if not is_one_line(str(value)):
            raise UserError(f"{name} = {value!r} has a line break, which would break the job script; rename output_dir")
    return [
        f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"
        for name, value in options.items()
        if value is not None and value is not False
    ]


def usual_output(folder: Path) -> str:
    """Where a job prints to that says nothing of it."""
    return f"{as_pattern(folder)}/slurm-%j.out"


def make_log_folders(slurm: SlurmConfig) -> None:
    """Of `output` and `error`, up to a folder whose name SLURM fills in: it makes none itself, and fails a job whose
    files have none."""
    for option in ("output", "error"):
        if (pattern := slurm.sbatch.get(option)) is not None:
            place = Path(str(slurm.sbatch.get("chdir", "."))) / str(pattern)
            fixed = takewhile(lambda part: "%" not in part.replace("%%", ""), place.parent.parts)
            folder = Path(*(part.replace("%%", "%") for part in fixed))
            with refuse_unwritable(folder, f"slurm.{option}"):
                folder.mkdir(parents=True, exist_ok=True)


def as_pattern(folder: Path) -> str:
    """A folder as `--output` has it, where SLURM replaces what begins with %."""
    return str(folder).replace("%", "%%")


def check_venv(venv: Path | None, key: str = "slurm.venv") -> None:
    if venv is not None and not (venv / "bin" / "activate").exists():
        raise UserError(f"{key} = {str(venv)!r} is no virtual environment: it has no bin/activate; give one, or none")


def _custom_environment() -> Path | None:
    """The virtual environment of this process, if it runs in one."""
    return Path(sys.prefix) if sys.prefix != sys.base_prefix and (Path(sys.prefix) / "bin/activate").exists() else None
