"""A run of `rl` inside a SLURM job of several nodes.

    first nodes    `rl` itself, the orchestrator, and the trainer's ranks: torchrun, started by srun on each of them
    last nodes     one inference server each, started by the job script

The script says who is where: TANDEM_SERVERS, TANDEM_TRAINER_NODES and TANDEM_RENDEZVOUS.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from tandem.config.rl import RLConfig
from tandem.launch.gpus import GpuPlan, find_gpu_plan
from tandem.launch.plan import API_KEY_VAR, ProcessPlan
from tandem.launch.slurm.job import in_job, shutdown_timeout
from tandem.utils.processes import SUPERVISOR_PID, usable_cores


def servers_of_job(config: RLConfig) -> str:
    """The addresses of the servers that the job script has started, separated by commas; empty: it has started none."""
    return os.environ.get("TANDEM_SERVERS", "") if config.slurm is not None and in_job() else ""


def gpus_of_node(config: RLConfig) -> GpuPlan | None:
    """The GPU plan of this machine; servers of a job have nodes of their own."""
    return find_gpu_plan(config.model_copy(update={"inference": None}) if servers_of_job(config) else config)


def lay_over_nodes(plans: Sequence[ProcessPlan], config: RLConfig) -> list[ProcessPlan]:
    """What `rl` starts in its job; elsewhere, and on one node, the plan as it is."""
    if config.slurm is None or config.slurm.nodes == 1 or not in_job():
        return list(plans)
    servers, trainer_nodes = servers_of_job(config), os.environ["TANDEM_TRAINER_NODES"].split(",")
    laid = []
    for plan in plans:
        if plan.name == "inference" and servers:
            continue  # the job script has started them
        if plan.name == "orchestrator" and servers:
            plan = _asking(plan, servers)
        if plan.name == "trainer":
            if servers and config.trainer.threads is None:  # no server shares its cores
                threads = max(1, usable_cores() // config.trainer.parallel.ranks)
                plan = replace(plan, config=plan.config | {"threads": threads})
            plan = _over(plan, trainer_nodes, config) if len(trainer_nodes) > 1 else plan
        laid.append(plan)
    return laid


def _asking(plan: ProcessPlan, servers: str) -> ProcessPlan:
    client = plan.config["client"] | {"base_url": servers}
    if client["api_key_var"] is None:
        client["api_key_var"] = API_KEY_VAR
    return replace(plan, config=plan.config | {"client": client})


def _over(plan: ProcessPlan, nodes: Sequence[str], config: RLConfig) -> ProcessPlan:
    """torchrun on each of the nodes. Its ranks are no children of `rl`: srun ends them when `rl` ends it."""
    *_, module, sign, config_file = plan.command
    count = len(nodes)
    command = [
        *("srun", f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", f"--nodelist={','.join(nodes)}"),
        *("--overlap", "--kill-on-bad-exit=1", "env", f"--unset={SUPERVISOR_PID}"),
        *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}"),
        *(f"--nproc-per-node={plan.config['parallel']['ranks']}", "--rdzv-backend=c10d"),
        *(f"--rdzv-id={os.environ['SLURM_JOB_ID']}", f"--rdzv-endpoint={os.environ['TANDEM_RENDEZVOUS']}"),
        f"--shutdown-timeout={shutdown_timeout(config.checkpoint.on_signal_timeout_s)}",
        *("-m", module, sign, config_file),
    ]
    return replace(plan, command=command)
