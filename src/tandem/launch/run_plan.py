"""What is decided before `rl` starts anything: processes, their GPUs, and the nodes of a job or a cluster."""

from dataclasses import dataclass
from pathlib import Path

from tandem.config.rl import Deployment, RLConfig
from tandem.launch.deployment import choose_deployment, deploy
from tandem.launch.gpus import GpuPlan, find_gpu_plan
from tandem.launch.plan import ProcessPlan, make_plan
from tandem.launch.ray_plan import RayPlaces, find_places, place_on_ray
from tandem.launch.slurm.nodes import lay_over_nodes, on_this_node


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
