"""What is decided before `rl` starts anything: processes, their GPUs, and the nodes of a job or a cluster. `--dry-run`
prints it."""

from dataclasses import dataclass
from pathlib import Path

from tandem.commands.rl import Deployment, RLConfig
from tandem.launch.local.deployment import choose_deployment, deploy
from tandem.launch.local.gpu_memory import estimate_memory, table
from tandem.launch.local.gpus import GpuPlan, find_gpu_plan
from tandem.launch.plan import ProcessPlan, make_plan
from tandem.launch.ray.placement import RayPlaces, find_places, place_on_ray
from tandem.launch.slurm.nodes import lay_over_nodes, on_this_node
from tandem.models.spec import ModelSpec
from tandem.utils.console import align
from tandem.utils.devices import VISIBLE
from tandem.utils.errors import UserError


@dataclass(frozen=True)
class RunPlan:
    config: RLConfig  # of this node: without servers where a SLURM job has started them on others
    processes: list[ProcessPlan]  # in the order they are started
    gpus: GpuPlan | None  # None: all on CPUs, or on Ray
    places: RayPlaces | None  # None: without Ray
    deployment: Deployment


def plan_run(config: RLConfig, config_folder: Path) -> RunPlan:
    """Raises UserError where it cannot be done."""
    here = on_this_node(config)
    gpus, places = find_gpu_plan(here), find_places(here)
    deployment = choose_deployment(here, gpus)
    planned = make_plan(here, config_folder, gpus=gpus)
    processes = deploy(planned, deployment, config_folder, config.release_cache)
    return RunPlan(here, place_on_ray(here, lay_over_nodes(processes, here), places), gpus, places, deployment)


def describe_run(config: RLConfig, plans: list[ProcessPlan], gpus: GpuPlan | None) -> list[str]:
    """Its processes, where they listen, their GPUs, and the memory those need."""
    lines = [f"  {line}" for line in align([(plan.name, _what(plan), _gpus_of(plan)) for plan in plans])]
    cpus = "on this machine's CPUs:" if config.ray.address is None else f"on the Ray cluster at {config.ray.address}:"
    deployment = choose_deployment(config, gpus)
    lines.insert(0, cpus if gpus is None and deployment == "split" else f"deployment {deployment}:")
    if gpus is None:
        return lines
    if not gpus.memory_bytes:
        lines.append(f"planned by {VISIBLE}: there is no GPU here to ask; 80 GiB each are assumed")
    try:
        spec = ModelSpec.load(config.model.name)
    except UserError as error:
        return [*lines, f"no estimate of memory: {error}"]
    return [*lines, "memory of each GPU, estimated, in GiB:", *table(estimate_memory(config, spec, gpus), gpus)]


def _what(plan: ProcessPlan) -> str:
    """Where it listens, whom it asks, how many ranks it has."""
    told = []
    for config in (*plan.more_configs.values(), plan.config):  # colocated, the trainer has the server's too
        if "server" in config:
            told.append(f"http://{config['server']['host']}:{config['server']['port']}")
        elif "client" in config:
            told.append(f"asks {config['client']['base_url']}")
        else:
            ranks = config["parallel"]["ranks"]
            told.append(f"{ranks} ranks" if ranks > 1 else "1 rank")
    return ", ".join(told)


def _gpus_of(plan: ProcessPlan) -> str:
    visible = plan.environment.get(VISIBLE)
    return "" if visible is None else f"{VISIBLE}={visible}"
