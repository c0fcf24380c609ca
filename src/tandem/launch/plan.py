"""What would be started: one entry a process, with its configuration, its share of the cores and its log."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tandem.config.rl import RLConfig, storable
from tandem.config.sources import Tree
from tandem.config.vllm import adapter_flags
from tandem.utils.processes import usable_cores
from tandem.utils.run_dir import RunDir

API_KEY_VAR = "TANDEM_API_KEY"
SGLANG_KEY_VAR = "TANDEM_SGLANG_API_KEY"


@dataclass(frozen=True)
class ProcessPlan:
    name: str
    command: list[str]
    environment: dict[str, str]  # on top of the launcher's own
    config: dict[str, Any]
    log: Path
    beside: Mapping[str, dict[str, Any]] = field(default_factory=dict)  # more configurations, by the file's name
    listens_as: str | None = None  # the server whose port it listens on, where that is not its own name

    def describe(self) -> dict[str, Any]:
        """The plan as `--dry-run` writes it; values of environment variables may be secrets and stay out."""
        return {"command": self.command, "environment": sorted(self.environment), "log": str(self.log)}


def make_plan(config: RLConfig, config_folder: Path, num_cores: int | None = None) -> list[ProcessPlan]:
    """The processes of a run in the order they are started."""
    run_dir = RunDir(config.output_dir)
    threads = share_cores(config, num_cores or usable_cores())
    configs: dict[str, dict[str, Any]] = {}
    secrets: dict[str, str] = {}
    if config.inference is not None:
        configs["inference"] = config.inference.model_dump(mode="json")
        secrets |= _hide_server_keys(configs["inference"])
        # The orchestrator hands over what the trainer publishes there.
        configs["inference"]["server"]["weight_roots"].append(str(config.output_dir.resolve()))
        if config.trainer.lora is not None and config.inference.engine == "vllm":
            flags = adapter_flags(config.trainer.lora.rank) | config.inference.vllm.flags
            configs["inference"]["vllm"]["flags"] = flags
    configs["orchestrator"] = config.orchestrator.model_dump(mode="json")
    secrets |= _hide_key(configs["orchestrator"]["client"])
    configs["trainer"] = config.trainer.model_dump(mode="json")
    for name in threads:
        configs[name]["threads"] = threads[name]
    return [
        ProcessPlan(
            name=name,
            command=[
                sys.executable,
                "-m",
                f"tandem.entrypoints.{name}",
                "@",
                str(config_folder / f"{name}.json"),
            ],
            environment={"PYTHONUNBUFFERED": "1", "OMP_WAIT_POLICY": "PASSIVE", **secrets},
            config=process_config,
            log=run_dir.log(name),
        )
        for name, process_config in configs.items()
    ]


def run_config(config: RLConfig) -> Tree:
    """What `rl --resume` reads: the configuration as it was given, without keys."""
    tree = storable(config)
    _hide_key(tree["orchestrator"]["client"])
    if tree["inference"] is not None:
        _hide_server_keys(tree["inference"])
    return tree


def share_cores(config: RLConfig, num_cores: int) -> dict[str, int]:
    """CPU threads of each of the trainer's ranks and of the server. Overlapped, they split the cores; taking turns,
    each gets all.

    Two processes whose threads spin on the same cores are many times slower than either alone.
    """
    trainer, inference = config.trainer.threads, config.inference.threads if config.inference else None
    overlapped = config.orchestrator.max_staleness > 0 and config.inference is not None
    for_inference = max(1, num_cores // 2) if overlapped else num_cores
    for_trainer = max(1, num_cores - for_inference) if overlapped else num_cores
    threads = {"trainer": trainer or max(1, for_trainer // config.trainer.parallel.ranks)}
    if config.inference is not None:
        threads["inference"] = inference or for_inference
    return threads


def _hide_server_keys(inference: dict[str, Any]) -> dict[str, str]:
    return _hide_key(inference["server"]) | _hide_key(inference["sglang"], SGLANG_KEY_VAR)


def _hide_key(section: dict[str, Any], variable: str = API_KEY_VAR) -> dict[str, str]:
    """API keys travel in the environment, never in a config file on a shared disk."""
    key = section["api_key"]
    if key is None:
        return {}
    section["api_key"] = None
    section["api_key_var"] = variable
    return {variable: key}
