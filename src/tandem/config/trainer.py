"""Options of the RL trainer."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from tandem.config.base import Config
from tandem.config.shared import (
    CheckpointConfig,
    Device,
    LogLevel,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
)


class LossConfig(Config):
    """The policy-gradient objective."""

    type: Literal["grpo"] = "grpo"
    """grpo: clipped importance ratio to the sampling policy, averaged over tokens."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio is clipped below at 1 - clip_low."""

    clip_high: float = Field(default=0.2, gt=0)
    """The ratio is clipped above at 1 + clip_high."""


class TrainerConfig(Config):
    """Loss, optimizer, checkpoints, weights."""

    model: ModelConfig
    output_dir: Path = Path("outputs/rl")
    """Run directory, shared with the orchestrator."""

    max_steps: int = Field(default=100, ge=1)
    """Training steps of the run."""

    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    keep_weights: int = Field(default=4, ge=2)
    """How many published versions to keep on disk."""

    rollout_timeout_s: float = Field(default=1800.0, gt=0)
    """Longest wait for a batch from the orchestrator."""

    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads; None: all cores (under `rl`, its share of them)."""

    seed: int = 0
    """Seeds whatever the trainer draws at random."""

    deterministic: bool = False
    """Repeat bit for bit."""

    resume: bool = False
    """Go on from the newest complete checkpoint in output_dir."""

    log_level: LogLevel = "info"
    """Least severe log lines to show."""
