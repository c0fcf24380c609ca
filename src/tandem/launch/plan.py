"""What would be started: one entry a process, with its configuration, its share of the cores and its log."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.commands.rl import RLConfig, storable
from tandem.config.sources import Tree
from tandem.config.vllm import adapter_flags
from tandem.launch.local.gpus import GpuPlan, server_names, vllm_parallelism
from tandem.utils.processes import usable_cores
from tandem.utils.run_dir import RunDir

API_KEY_VAR = "TANDEM_API_KEY"
SGLANG_KEY_VAR = "TANDEM_SGLANG_API_KEY"
SHARED_UTILIZATION = 0.5  # of a GPU, for vLLM next to a trainer; alone it would take nine tenths


@dataclass(frozen=True)
class ProcessPlan:
    name: str
    command: list[str]
    environment: dict[str, str]  # on top of the launcher's own
    config: dict[str, Any]
    log: Path
    more_configs: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # by the file's name
    listens_as: str | None = None  # the server whose port it listens on, where that is not its own name

    def describe(self) -> dict[str, Any]:
        """The plan as `--dry-run` writes it; values of environment variables may be secrets and stay out."""
        return {"command": self.command, "environment": sorted(self.environment), "log": str(self.log)}


def make_plan(
    config: RLConfig, config_folder: Path, num_cores: int | None = None, gpus: GpuPlan | None = None
) -> list[ProcessPlan]:
    """The processes of a run in the order they are started. Without a GPU plan, all see what this process sees."""
    run_dir = RunDir(config.output_dir)
    servers = server_configs(config, gpus)
    orchestrator = config.orchestrator.model_dump(mode="json")
    trainer = config.trainer.model_dump(mode="json")
    if len(servers) > 1:
        orchestrator["client"]["base_url"] = ",".join(server_urls(config, len(servers)))
    secrets = hide_keys({"orchestrator": orchestrator})
    if gpus is not None and gpus.trainer:
        trainer["parallel"]["ranks"] = len(gpus.trainer)
    threads = share_cores(config, num_cores or usable_cores(), len(servers), trainer["parallel"]["ranks"])
    for server in servers.values():
        secrets |= hide_keys({"inference": server})
        server["threads"] = threads["inference"]
    trainer["threads"] = threads["trainer"]
    places = {} if gpus is None else dict(zip(servers, gpus.servers, strict=False)) | {"trainer": gpus.trainer}
    plans = []
    for name, process_config in (servers | {"orchestrator": orchestrator, "trainer": trainer}).items():
        environment = {"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "PASSIVE", **secrets}
        if gpus is not None and places.get(name):
            environment |= gpus.environment(places[name])
        module = f"tandem.entrypoints.{name.partition('_')[0]}"
        command = [sys.executable, "-m", module, "@", str(config_folder / f"{name}.json")]
        plans.append(ProcessPlan(name, command, environment, process_config, run_dir.log(name)))
    return plans


def server_configs(config: RLConfig, gpus: GpuPlan | None = None) -> dict[str, dict[str, Any]]:
    """The configuration of each inference server, by the name of its process."""
    if config.inference is None:
        return {}
    alone = config.trainer.parallel.ranks if config.deployment == "colocated" else 1
    count = max(1, len(gpus.servers)) if gpus is not None else alone
    found = {}
    for number, name in enumerate(server_names(count)):
        server = config.inference.model_dump(mode="json")
        server["server"]["port"] += number
        # The orchestrator hands over what the trainer publishes there.
        server["server"]["weight_roots"].append(str(config.output_dir.resolve()))
        if config.inference.engine == "vllm":
            server["vllm"]["flags"] = _vllm_flags(config, gpus)
            if gpus is not None and gpus.is_together and server["gpu_memory_utilization"] is None:
                server["gpu_memory_utilization"] = SHARED_UTILIZATION
        found[name] = server
    return found


def _vllm_flags(config: RLConfig, gpus: GpuPlan | None) -> dict[str, Any]:
    """Those that were given, over what the run and its GPUs ask for."""
    assert config.inference is not None
    given = config.inference.vllm.flags
    flags = {} if config.trainer.lora is None else adapter_flags(config.trainer.lora.rank)
    copy, copies = vllm_parallelism(given)
    num_gpus = len(gpus.servers[0]) if gpus is not None and gpus.servers else 0
    if copies is None and num_gpus > copy:
        flags["data-parallel-size"] = num_gpus // copy
    return flags | given


def server_urls(config: RLConfig, count: int) -> list[str]:
    """Where the servers that `rl` starts can be reached: on ports one after another."""
    assert config.inference is not None
    server = config.inference.server
    return [server.model_copy(update={"port": server.port + number}).url for number in range(count)]


def run_config(config: RLConfig) -> Tree:
    """What `rl --resume` reads: the configuration as it was given, without keys."""
    tree = storable(config)
    hide_keys(tree)
    return tree


def share_cores(config: RLConfig, num_cores: int, num_servers: int = 1, num_ranks: int | None = None) -> dict[str, int]:
    """CPU threads of each of the trainer's ranks and of each server. Overlapped, they split the cores; taking turns,
    each gets all.

    Two processes whose threads spin on the same cores are many times slower than either alone.
    """
    trainer, inference = config.trainer.threads, config.inference.threads if config.inference else None
    overlapped = config.orchestrator.max_staleness > 0 and config.inference is not None
    for_inference = max(1, num_cores // 2) if overlapped else num_cores
    for_trainer = max(1, num_cores - for_inference) if overlapped else num_cores
    threads = {"trainer": trainer or max(1, for_trainer // (num_ranks or config.trainer.parallel.ranks))}
    if config.inference is not None:
        threads["inference"] = inference or max(1, for_inference // num_servers)
    return threads


def hide_keys(tree: Tree) -> dict[str, str]:
    """API keys travel in the environment, never in a config file on a shared disk. Takes them out of a configuration of
    `rl`, or of a part of it."""
    orchestrator, inference = (tree.get(name) or {} for name in ("orchestrator", "inference"))
    return (
        _hide_key(orchestrator.get("client"))
        | _hide_key(inference.get("server"))
        | _hide_key(inference.get("sglang"), SGLANG_KEY_VAR)
    )


def _hide_key(section: dict[str, Any] | None, variable: str = API_KEY_VAR) -> dict[str, str]:
    key = None if section is None else section.get("api_key")
    if section is None or key is None:
        return {}
    section["api_key"] = None
    section["api_key_var"] = variable
    return {variable: key}
