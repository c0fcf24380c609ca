"""A run before it starts, in a few lines: its processes, where they listen, their GPUs, the memory those need."""

from tandem.config.rl import RLConfig
from tandem.launch.deployment import choose_deployment
from tandem.launch.gpus import GpuPlan
from tandem.launch.memory import estimate_memory, table
from tandem.launch.plan import ProcessPlan
from tandem.models.spec import ModelSpec
from tandem.utils.columns import align
from tandem.utils.devices import VISIBLE
from tandem.utils.errors import UserError


def describe_run(config: RLConfig, plans: list[ProcessPlan], gpus: GpuPlan | None) -> list[str]:
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
    for config in (*plan.beside.values(), plan.config):  # colocated, the trainer has the server beside it
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
