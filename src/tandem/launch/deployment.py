"""What `deployment` makes of the processes of a run."""

import sys
from dataclasses import replace
from pathlib import Path

from tandem.launch.plan import ProcessPlan


def share(plans: list[ProcessPlan]) -> list[ProcessPlan]:
    """The trainer hands its weights to the server through memory."""
    return [
        replace(plan, config=plan.config | {"share_weights": True}) if plan.name == "trainer" else plan
        for plan in plans
    ]


def colocate(plans: list[ProcessPlan], config_folder: Path) -> list[ProcessPlan]:
    """The trainer's process takes the server in: it is called the trainer, and listens on the server's port."""
    named = {plan.name: plan for plan in plans}
    server, trainer = named.pop("inference"), named["trainer"]
    command = [sys.executable, "-m", "tandem.entrypoints.colocated"]
    for name in ("trainer", "inference"):
        command += [f"--{name}", "@", str(config_folder / f"{name}.json")]
    named["trainer"] = replace(
        trainer,
        command=command,
        environment=server.environment | trainer.environment,
        beside={"inference": server.config},
        listens_as="inference",
    )
    # The server is waited for by the others, so its process is started first.
    return [named.pop("trainer"), *named.values()]
