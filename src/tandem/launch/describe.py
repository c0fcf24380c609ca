"""A run before it starts, in a few lines: its processes, where they listen, their GPUs, the memory those need."""

from tandem.config.rl import RLConfig
from tandem.launch.deployment import choose_deployment
from tandem.launch.gpus import GpuPlan
from tandem.launch.memory import estimate_memory, table
from tandem.launch.plan import ProcessPlan
from tandem.models.spec import ModelSpec
from tandem.utils.devices import VISIBLE
from tandem.utils.errors import UserError


def describe_run(config: RLConfig, plans: list[ProcessPlan], gpus: GpuPlan | None) -> list[str]:
    rows = [(plan.name, _what(plan), _gpus_of(plan)) for plan in plans]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {name:<{widths[0]}}  {what:<{widths[1]}}  {gpu}".rstrip() for name, what, gpu in rows]
    deployment = choose_deployment(config, gpus)
    is_told = gpus is not None or deployment != "split"
    lines.insert(0, f"deployment {deployment}:" if is_told else "on this machine's CPUs:")
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
    """An address, or how many there are."""
    if "server" in plan.config:
        server = plan.config["server"]
        return f"http://{server['host']}:{server['port']}"
    if "client" in plan.config:
        return f"asks {plan.config['client']['base_url']}"
    ranks = plan.config["parallel"]["ranks"]
    return f"{ranks} ranks" if ranks > 1 else "1 rank"


def _gpus_of(plan: ProcessPlan) -> str:
    visible = plan.environment.get(VISIBLE)
    return "" if visible is None else f"{VISIBLE}={visible}"
