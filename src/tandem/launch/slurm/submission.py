"""`rl @ rl.toml --slurm.nodes 2`: the command becomes a job script and is submitted, in place of being run.

Each job has a folder of its own, `<output_dir>/slurm/1`, `2`, …, with its script, its configuration and what it prints.
Nothing in there is written again: a job that waits, or is queued again, runs what it was submitted with.
"""

import os
from pathlib import Path

from tandem.commands.changes import review_changes
from tandem.commands.evaluate import EvaluateConfig
from tandem.commands.offline import OfflineConfig
from tandem.commands.rl import RLConfig
from tandem.config.slurm import SlurmConfig
from tandem.config.sources import Tree
from tandem.data.dataset import check_sources
from tandem.envs.registry import check_names
from tandem.launch.plan import API_KEY_VAR, SGLANG_KEY_VAR, make_plan, run_config
from tandem.launch.restarts import delay_before_s
from tandem.launch.slurm.commands import job_below, require_slurm, submit
from tandem.launch.slurm.job import Job, check_venv, in_script, make_log_folders, render
from tandem.models.files import check_model, check_model_dir
from tandem.orchestrator.evaluation.models import models_of
from tandem.trainer.checkpoints.history import require_checkpoint
from tandem.utils.errors import UserError
from tandem.utils.files import locked, write_atomic, write_config
from tandem.utils.log import say
from tandem.utils.manifest import MANIFEST
from tandem.utils.run_dir import RunDir, steps_with
from tandem.utils.run_lock import refuse_unwritable

# Of this call, not of the job.
NOT_STORED = ("clean", "resume", "dry_run")


def is_to_be_submitted(slurm: SlurmConfig | None) -> bool:
    """Not by a job script, which has been, nor in the ranks of a torchrun that somebody has started."""
    return slurm is not None and not in_script() and "RANK" not in os.environ


def submit_run(command: str, config: RLConfig | OfflineConfig) -> None:
    """Write the script and the configuration of a new job, and submit it; a dry run only writes."""
    assert config.slurm is not None
    RunDir(config.output_dir).refuse_another_run(resume=config.resume, clean=config.clean)
    _check(command, config)
    folder = new_folder(config.output_dir)
    flags = {"--clean": config.clean, "--resume": config.resume, "--allow-changes": config.allow_changes}
    job = Job(
        name=_name(config.slurm, config.output_dir),
        command=command,
        config_file=folder / f"{command}.json",
        folder=folder,
        slurm=config.slurm,
        run=config.output_dir.resolve(),
        save_timeout_s=config.checkpoint.on_signal_timeout_s,
        first=[flag for flag, given in flags.items() if given],
        comment=[f"Written by `{command}`; the configuration is in {folder / command}.json"],
    )
    secrets: dict[str, str] = {}
    files: dict[Path, Tree] = {}
    if isinstance(config, RLConfig):
        job, secrets, files = with_servers(job, config)
        tree = run_config(config)
    else:
        tree = config.model_dump(mode="json", exclude_unset=True)
        ranks = config.parallel.ranks if "ranks" in config.parallel.model_fields_set else config.slurm.gpus_per_node
        job = job.changed(ranks_per_node=max(1, ranks))
        tree["parallel"] = tree.get("parallel", {}) | {"ranks": job.ranks_per_node}
    files[job.config_file] = {key: value for key, value in tree.items() if key not in NOT_STORED}
    _hand_over(job, files, config.dry_run, secrets)


def new_folder(output_dir: Path) -> Path:
    """Of a job that nobody has written yet: numbered, and not made yet."""
    jobs = output_dir.resolve() / "slurm"
    numbers = [int(path.name) for path in jobs.glob("*") if path.name.isdecimal()]
    return jobs / str(max(numbers, default=0) + 1)


def _check(command: str, config: RLConfig | OfflineConfig) -> None:
    """What would else be found out when the job has waited for its nodes."""
    assert config.slurm is not None
    check_venv(config.slurm.venv)
    if config.resume:
        _check_resumed(config)
    if not waits_for_others(config.slurm):
        check_model(config.model)
    if isinstance(config, RLConfig):
        for plan in config.orchestrator.plans.values():
            check_names(plan.env)
        return
    _refuse_servers(command, config.slurm)
    if not waits_for_others(config.slurm):
        check_sources(config.data)


def _check_resumed(config: RLConfig | OfflineConfig) -> None:
    """Whether the checkpoints are undamaged is for the job to see: that takes long."""
    run_dir = RunDir(config.output_dir)
    complete = steps_with(run_dir.checkpoints, MANIFEST)
    if not complete:
        require_checkpoint(run_dir)
    if isinstance(config, RLConfig):  # the others know their steps when they have read their rows
        review_changes(config, run_dir.config / "rl.json", complete[-1], allowed=config.allow_changes)


def waits_for_others(slurm: SlurmConfig) -> bool:
    """Whether the job begins when others have ended: they may make its model and its data."""
    return "dependency" in slurm.sbatch


def _refuse_servers(command: str, slurm: SlurmConfig) -> None:
    if slurm.inference_nodes is not None:
        raise UserError(
            f"slurm.inference_nodes = {slurm.inference_nodes} is for `rl`: `{command}` has no inference servers of its "
            "own; leave it out"
        )


def submit_evaluation(config: EvaluateConfig) -> None:
    assert config.slurm is not None
    if config.endpoint.api_key is not None:
        raise UserError("endpoint.api_key would be written to a file of the job; give endpoint.api_key_var instead")
    if config.slurm.nodes > 1:
        raise UserError(f"slurm.nodes = {config.slurm.nodes}: `evaluate` runs on one node; leave it out")
    _refuse_servers("evaluate", config.slurm)
    check_venv(config.slurm.venv)
    check_names(config.env)
    if config.endpoint.base_url is None and not waits_for_others(config.slurm):
        check_model_dir(models_of(config)[0])
    folder = new_folder(config.output_dir)
    job = Job(
        name=_name(config.slurm, config.output_dir),
        command="evaluate",
        config_file=folder / "evaluate.json",
        folder=folder,
        slurm=config.slurm,
        comment=["Written by `evaluate`"],
    )
    tree = config.model_dump(mode="json", exclude_unset=True, exclude={"dry_run"})
    _hand_over(job, {job.config_file: tree}, config.dry_run, {})


def with_servers(job: Job, config: RLConfig) -> tuple[Job, dict[str, str], dict[Path, Tree]]:
    """`rl` on its first node, and servers on others; the keys, which travel in the environment of the job; the files
    that it needs besides its own."""
    slurm = job.slurm
    if slurm.nodes > 1:
        _refuse_one_machine(config, slurm)
    plans = {plan.name: plan for plan in make_plan(config, job.folder)}
    variables = plans["orchestrator"].environment
    secrets = {name: variables[name] for name in (API_KEY_VAR, SGLANG_KEY_VAR) if name in variables}
    if config.inference is None:
        if slurm.inference_nodes:
            raise UserError(
                f"slurm.inference_nodes = {slurm.inference_nodes} without an inference section: the run uses "
                "servers that are there; leave it out"
            )
        return job, secrets, {}
    arguments = "" if "port" in config.inference.server.model_fields_set else "--inference.server.port $serving_port"
    ranks = config.trainer.parallel
    if slurm.nodes > 1 and slurm.gpus_per_node > 1 and "ranks" not in ranks.model_fields_set:
        arguments += f" --trainer.parallel.ranks {slurm.gpus_per_node}"
    if slurm.serving_nodes == 0:
        return job.changed(arguments=arguments), secrets, {}
    server = plans["inference"].config
    variable = server["server"]["api_key_var"] or API_KEY_VAR
    inference = job.folder / "inference.json"
    tree = server | {"server": server["server"] | {"api_key_var": variable}, "threads": config.inference.threads}
    # vLLM serves from all GPUs of a node by itself (--inference.vllm.flags.data-parallel-size), ours from one.
    per_node = 1 if config.inference.engine == "vllm" else max(1, slurm.gpus_per_node)
    serving = {
        "serving": slurm.serving_nodes,
        "servers_per_node": per_node,
        "inference": inference,
        "delays_s": [delay_before_s(restart, config.restart_delay_s) for restart in range(1, config.max_restarts + 1)],
    }
    return job.changed(arguments=arguments, **serving), secrets, {inference: tree}


def _refuse_one_machine(config: RLConfig, slurm: SlurmConfig) -> None:
    """What says how trainer and servers share the GPUs of one machine, where each has nodes of its own."""
    if config.deployment not in (None, "split"):
        raise UserError(f"deployment = {config.deployment!r} is for one node, and slurm.nodes = {slurm.nodes}; give 1")
    if config.gpus.inference is not None and slurm.serving_nodes > 0:
        raise UserError(
            f"gpus.inference = {config.gpus.inference!r}: servers have all GPUs of their nodes; leave it out, or set "
            "slurm.inference_nodes"
        )


def _hand_over(job: Job, files: dict[Path, Tree], dry_run: bool, secrets: dict[str, str]) -> None:
    script, text, jobs = job.folder / "job.sh", render(job), job.folder.parent
    if not dry_run:
        require_slurm()
    with refuse_unwritable(job.folder):
        jobs.mkdir(parents=True, exist_ok=True)
    with locked(jobs / ".lock"):  # of two commands at once, the second one sees the first one's job
        if not dry_run:
            refuse_queued(jobs)
        with refuse_unwritable(job.folder):
            _write(job.folder, files, script, text)
        make_log_folders(job.slurm)
        if dry_run:
            say(f"dry run: the job script is {script}; nothing was submitted")
            return
        number = submit(script, environment=secrets)
    prints = str(job.slurm.sbatch.get("output", f"{job.folder}/slurm-%j.out"))
    say(f"submitted job {number} ({script}); it prints to {prints.replace('%j', number)}")


def refuse_queued(jobs: Path) -> None:
    """One job at a time for a directory: the second would find another run in it, or fight with the first."""
    if (found := job_below(jobs)) is not None:
        number, state = found
        raise UserError(
            f"output_dir = {str(jobs.parent)!r} has a job already: {number}, {state}; wait for it, cancel it "
            f"(scancel {number}), or choose another --output-dir"
        )


def _write(folder: Path, files: dict[Path, Tree], script: Path, text: str) -> None:
    try:
        folder.mkdir()
    except FileExistsError:
        raise UserError(f"another command has just written a job to {folder}; try again") from None
    for path, tree in files.items():
        write_config(path, tree)
    write_atomic(script, text.encode())


def _name(slurm: SlurmConfig, output_dir: Path) -> str:
    return str(slurm.sbatch.get("job-name", output_dir.resolve().name))
