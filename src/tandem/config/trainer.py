"""Options of the RL trainer."""

from pathlib import Path

from pydantic import Field, model_validator

from tandem.config.base import Config
from tandem.config.lora import LoRAConfig, check_lora
from tandem.config.losses import LossConfig
from tandem.config.parallel import ParallelConfig, require_room
from tandem.config.shared import (
    CheckpointConfig,
    Device,
    LogLevel,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
)


class TrainerConfig(Config):
    """The trainer: loss, optimizer, checkpoints, published weights."""

    model: ModelConfig
    output_dir: Path = Path("outputs/rl")
    """Run directory, shared with the orchestrator."""

    max_steps: int = Field(default=100, ge=1)
    """Training steps of the run."""

    seq_len: int = Field(default=2048, ge=2)
    """Longest prompt + completion, in tokens."""

    tokens_per_microbatch: int = Field(default=0, ge=0)
    """Most tokens in one micro-batch. It changes memory, not the update. 0: 8192, or on a GPU as many as its memory
    holds, and always room for one sequence."""

    updates_per_batch: int = Field(default=1, ge=1)
    """Optimizer updates per pass over a batch; each takes about an equal share of it."""

    epochs_per_batch: int = Field(default=1, ge=1)
    """Passes over each batch."""

    loss: LossConfig = LossConfig()
    lora: LoRAConfig | None = None
    """Train a LoRA adapter. Left out: train the whole model."""

    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()

    keep_weights: int = Field(default=4, ge=2)
    """Number of published versions to keep on disk."""

    rollout_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for a batch from the orchestrator."""

    device: Device = "auto"
    """Where to compute. auto: a GPU if there is one."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads. None: all cores (under `rl`, its share of them)."""

    seed: int = 0
    """Seed of all randomness in the trainer."""

    deterministic: bool = False
    """Make the run repeat bit for bit."""

    resume: bool = False
    """Continue from the newest complete checkpoint in output_dir."""

    log_level: LogLevel = "info"
    """Least severe log lines to show."""

    @model_validator(mode="after")
    def _consistent(self) -> "TrainerConfig":
        require_room(self.tokens_per_microbatch, self.seq_len)
        check_lora(self.model, self.lora)
        return self
