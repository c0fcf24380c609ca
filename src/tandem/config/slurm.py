"""Options of a SLURM job: `rl @ rl.toml --slurm.nodes 2 --slurm.time 2:00:00` submits one instead of starting a run."""

import re
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, Field, model_validator

from tandem.config.base import Config
from tandem.config.sbatch import gpus_per_node, sbatch_name, sbatch_value
from tandem.utils.secrets import names_secret


class SlurmConfig(Config):
    """Submit a SLURM job instead. Any other option of sbatch is passed through: --slurm.account, --slurm.gres, …"""

    model_config = ConfigDict(extra="allow", frozen=True)

    nodes: int = Field(default=1, ge=1)
    """Nodes of the job."""

    inference_nodes: int | None = Field(default=None, ge=0)
    """For `rl`: how many of them have inference servers; orchestrator and trainer run on the others. None: half,
    rounded up. 0: the server is on the first node, with the trainer."""

    venv: Path | None = None
    """Virtual environment that the job activates. None: the one that the command runs in."""

    signal_s: int = Field(default=120, ge=1)
    """So many seconds before the time limit the run saves a checkpoint and is queued again. (SLURM may be a minute
    early.)"""

    @model_validator(mode="before")
    @classmethod
    def _are_options_of_sbatch(cls, data: Any) -> Any:
        if isinstance(data, dict):
            for name in data:
                if name not in cls.model_fields and name != "@":
                    sbatch_name(name)
        return data

    @property
    def sbatch(self) -> dict[str, Any]:
        """What is handed to sbatch, by its long names."""
        given = {sbatch_name(name): value for name, value in (self.model_extra or {}).items() if value is not None}
        return {"nodes": self.nodes, **{option: sbatch_value(option, value) for option, value in given.items()}}

    @property
    def requeues(self) -> bool | None:
        """Whether the job may be queued again; None: nothing is said of it."""
        given = self.sbatch
        return given["requeue"] if "requeue" in given else not given["no-requeue"] if "no-requeue" in given else None

    @property
    def gpus_per_node(self) -> int:
        return gpus_per_node({name: str(value) for name, value in self.sbatch.items()}, self.nodes)

    @property
    def serving_nodes(self) -> int:
        """With a server each. On a single node `rl` starts everything itself."""
        if self.inference_nodes is not None:
            return self.inference_nodes
        return (self.nodes + 1) // 2 if self.nodes > 1 else 0

    @model_validator(mode="after")
    def _has_values_for_sbatch(self) -> Self:
        given = self.sbatch
        for variable in re.findall(r"(\w+)=", str(given.get("export", ""))):
            if names_secret(variable):
                raise ValueError(
                    f"export holds {variable}, which all could read in the job script; set {variable} where you give "
                    "the command (SLURM hands it to the job), or under `environment` of a sweep"
                )
        if "requeue" in given and given["requeue"] == given.get("no-requeue"):
            raise ValueError("requeue and no-requeue contradict each other; give one of them")
        return self

    @model_validator(mode="after")
    def _leaves_a_trainer(self) -> Self:
        if self.serving_nodes >= self.nodes:
            raise ValueError(
                f"inference_nodes = {self.serving_nodes} leaves none of nodes = {self.nodes} to the trainer; "
                f"give at most {self.nodes - 1}"
            )
        return self


class SlurmOptions(Config):
    """Where a command runs."""

    slurm: SlurmConfig | None = None
    """Submit a SLURM job instead. Left out: run here. docs/slurm.md."""
