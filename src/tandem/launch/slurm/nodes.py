"""A run of `rl` inside a SLURM job of several nodes.

    first nodes    `rl` itself, the orchestrator, and the trainer's ranks: torchrun, started by srun on each of them
    last nodes     inference servers, started by the job script

The script says who is where: TANDEM_SERVERS, TANDEM_TRAINER_NODES and TANDEM_RENDEZVOUS.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace

from tandem.commands.rl import RLConfig
from tandem.launch.local.ranks import TORCHRUN
from tandem.launch.plan import API_KEY_VAR, ProcessPlan
from tandem.launch.slurm import srun
from tandem.launch.slurm.job import RENDEZVOUS, in_job, shutdown_timeout
from tandem.utils.processes import SUPERVISOR_PID


def on_this_node(config: RLConfig) -> RLConfig:
    """What `rl` itself starts: no servers where the job script has started some, which are asked instead."""
    servers = os.environ.get("TANDEM_SERVERS") if config.slurm is not None and in_job() else None
    if not servers:
        return config
    client = config.orchestrator.client
    has_key = client.api_key is not None or client.api_key_var is not None
    asked = client.model_copy(update={"base_url": servers} | ({} if has_key else {"api_key_var": API_KEY_VAR}))
    return config.model_copy(
        update={"inference": None, "orchestrator": config.orchestrator.model_copy(update={"client": asked})}
    )


def lay_over_nodes(plans: Sequence[ProcessPlan], config: RLConfig) -> list[ProcessPlan]:
    """In a job with several trainer nodes, the trainer on all of them; elsewhere the plan as it is."""
    nodes = os.environ.get("TANDEM_TRAINER_NODES", "").split(",") if config.slurm is not None and in_job() else []
    save_timeout_s = config.checkpoint.on_signal_timeout_s
    return [_over(plan, nodes, save_timeout_s) if plan.name == "trainer" and len(nodes) > 1 else plan for plan in plans]


def _over(plan: ProcessPlan, nodes: Sequence[str], save_timeout_s: float) -> ProcessPlan:
    """torchrun on each of the nodes. Its ranks are no children of `rl`: srun ends them when `rl` is gone."""
    *_, module, sign, config_file = plan.command
    count = len(nodes)
    command = [
        *(sys.executable, "-m", srun.MODULE, f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"),
        *(f"--nodelist={','.join(nodes)}", "--overlap", "--kill-on-bad-exit=1", "--"),
        *("env", f"--unset={SUPERVISOR_PID}"),
        *(sys.executable, "-m", TORCHRUN, f"--nnodes={count}"),
        f"--nproc-per-node={plan.config['parallel']['ranks']}",
        *(RENDEZVOUS, f"--rdzv-endpoint={os.environ['TANDEM_RENDEZVOUS']}"),
        f"--shutdown-timeout={shutdown_timeout(save_timeout_s)}",
        *("-m", module, sign, config_file),
    ]
    return replace(plan, command=command)
