"""Options of supervised fine-tuning."""

from pathlib import Path

from pydantic import Field, model_validator

from tandem.config.base import Config
from tandem.config.shared import (
    Device,
    LogLevel,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
)


class SFTDataConfig(Config):
    """Conversations to imitate: JSON lines with `messages`, or `prompt` and `completion`."""

    path: Path
    """A .jsonl file."""

    shuffle: bool = True
    """Draw the rows in a new order each epoch."""


class SFTConfig(Config):
    """Supervised fine-tuning on conversations; only assistant messages are learned."""

    model: ModelConfig
    data: SFTDataConfig
    output_dir: Path = Path("outputs/sft")
    """Run directory; the model ends up in weights/latest."""

    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps."""

    seq_len: int = Field(default=2048, ge=2)
    """Longest conversation, in tokens."""

    batch_size: int = Field(default=32, ge=1)
    """Conversations per step."""

    tokens_per_microbatch: int = Field(default=8192, ge=2)
    """Most tokens packed into one forward and backward pass."""

    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    metrics: MetricsConfig = MetricsConfig()

    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads; None: all cores."""

    seed: int = 0
    """Seeds the order of the data."""

    deterministic: bool = False
    """Repeat bit for bit."""

    clean: bool = False
    """Delete a run that output_dir holds."""

    dry_run: bool = False
    """Check everything, write the resolved configuration, start nothing."""

    log_level: LogLevel = "info"
    """Least severe log lines to show."""

    @model_validator(mode="after")
    def _consistent(self) -> "SFTConfig":
        if self.tokens_per_microbatch < self.seq_len:
            raise ValueError(
                f"tokens_per_microbatch = {self.tokens_per_microbatch} cannot hold one sequence of "
                f"seq_len = {self.seq_len}; the smallest valid value is {self.seq_len}"
            )
        return self
