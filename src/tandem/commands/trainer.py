"""Options of the RL trainer."""

from pydantic import Field, model_validator

from tandem.algorithms.objective.policy import LossConfig
from tandem.config.lora import check_lora
from tandem.config.parallel import check_checkpointing, require_room
from tandem.config.shared import (
    ComputeOptions,
    LogOptions,
    ModelOptions,
    RunOptions,
    SeedOptions,
    SyncOptions,
)
from tandem.config.training import TrainingOptions


class TrainerConfig(LogOptions, ComputeOptions, SeedOptions, TrainingOptions, SyncOptions, RunOptions, ModelOptions):
    """The trainer: loss, optimizer, checkpoints, published weights."""

    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer updates per pass over a batch; each takes about an equal share of it."""

    epochs_per_batch: int = Field(default=1, ge=1)
    """Passes over each batch."""

    loss: LossConfig = LossConfig()
    keep_weights: int = Field(default=4, ge=2)
    """Number of published versions to keep on disk."""

    share_weights: bool = False
    """Hand new weights to the server through this machine's memory, and write their files in the background during the
    next step. `rl` sets it with deployment = "shared"."""

    rollout_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for a batch from the orchestrator."""

    @model_validator(mode="after")
    def _consistent(self) -> "TrainerConfig":
        require_room(self.tokens_per_microbatch, self.seq_len)
        check_lora(self.model, self.lora)
        check_checkpointing(self.model, self.parallel)
        return self
