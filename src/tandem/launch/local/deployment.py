"""What `deployment` makes of the processes of a run."""

import sys
from dataclasses import replace
from pathlib import Path

from tandem.commands.rl import Deployment, RLConfig
from tandem.launch.local.gpus import GpuPlan
from tandem.launch.plan import ProcessPlan

MEANINGS: dict[Deployment, str] = {
    "split": "trainer and server each have their own GPUs, new weights go through files",
    "shared": "trainer and server are two processes on one GPU or CPU, new weights go through its memory",
    "colocated": "trainer and server are one process",
}


def choose_deployment(config: RLConfig, gpus: GpuPlan | None) -> Deployment:
    """What was asked for; else `shared` where trainer and our own engine have one GPU between them."""
    if config.deployment is not None:
        return config.deployment
    is_ours = config.inference is not None and config.inference.engine == "native"
    is_linux = sys.platform.startswith("linux")
    return "shared" if gpus is not None and gpus.is_together and is_ours and is_linux else "split"


def deploy(
    plans: list[ProcessPlan], deployment: Deployment, config_folder: Path, release_cache: bool | None = None
) -> list[ProcessPlan]:
    if deployment == "colocated":
        return colocate(plans, config_folder, release_cache)
    return share(plans) if deployment == "shared" else plans


def share(plans: list[ProcessPlan]) -> list[ProcessPlan]:
    """The trainer hands its weights to the server through memory."""
    return [
        replace(plan, config=plan.config | {"share_weights": True}) if plan.name == "trainer" else plan
        for plan in plans
    ]


def colocate(plans: list[ProcessPlan], config_folder: Path, release_cache: bool | None = None) -> list[ProcessPlan]:
    """The trainer's process takes the server in: it is called the trainer, and listens on the server's port. Of several
    ranks each takes one in, on ports one after another."""
    named = {plan.name: plan for plan in plans}
    servers = [named.pop(name) for name in list(named) if name.startswith("inference")]
    server, trainer = servers[0], named["trainer"]
    command = [sys.executable, "-m", "tandem.entrypoints.colocated"]
    for name in ("trainer", "inference"):
        command += [f"--{name}", "@", str(config_folder / f"{name}.json")]
    if release_cache is not None:
        command += ["--release-cache", str(release_cache).lower()]
    named["trainer"] = replace(
        trainer,
        command=command,
        environment=server.environment | trainer.environment,
        more_configs={"inference": server.config},
        listens_as="inference" if len(servers) == 1 else None,
    )
    # The server is waited for by the others, so its process is started first.
    return [named.pop("trainer"), *named.values()]
