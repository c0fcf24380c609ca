"""What `sft` and `align` have in common: training on a dataset."""

import math
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from tandem.config.base import Config
from tandem.config.data import DataConfig, OfflineEvalConfig, require_held_out
from tandem.config.lora import LoRAConfig, check_lora
from tandem.config.parallel import ParallelConfig
from tandem.config.shared import (
    CheckpointConfig,
    Device,
    LogLevel,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    SchedulerConfig,
)
from tandem.config.sources import Tree


class OfflineConfig(Config):
    """Training on a dataset."""

    model: ModelConfig
    data: DataConfig
    output_dir: Path
    """Run directory. The model is written to weights/latest."""

    max_steps: int = Field(default=100, ge=1)
    """Optimizer steps. Or give epochs."""

    epochs: float | None = Field(default=None, gt=0)
    """Passes over the rows, or a fraction of one, instead of max_steps."""

    seq_len: int = Field(default=2048, ge=2)
    """Longest row, in tokens (of a pair: the prompt with one completion)."""

    batch_size: int = Field(default=32, ge=1)
    """Rows per step. A pair is one row."""

    tokens_per_microbatch: int = Field(default=0, ge=0)
    """Most tokens in one micro-batch. It changes memory, not the update. A pair is never split. 0: 8192, or on a GPU as
    many as its memory holds, and always room for one sequence or pair."""

    eval: OfflineEvalConfig = OfflineEvalConfig()
    lora: LoRAConfig | None = None
    """Train a LoRA adapter. Left out: train the whole model."""

    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    metrics: MetricsConfig = MetricsConfig()

    device: Device = "auto"
    """Where to compute. auto: a GPU if there is one."""

    threads: int | None = Field(default=None, ge=1)
    """CPU threads. None: all cores."""

    seed: int = 0
    """Seed of the data order and of all other randomness."""

    deterministic: bool = False
    """Make the run repeat bit for bit."""

    resume: bool = False
    """Continue the run in output_dir from its newest complete checkpoint. --resume DIR: continue the run in DIR
    with the configuration it was started with; other flags win over that."""

    allow_changes: bool = False
    """Resume even if options changed that affect what is learned."""

    clean: bool = False
    """Delete the run in output_dir first."""

    dry_run: bool = False
    """Check everything, write the resolved configuration, start nothing."""

    log_level: LogLevel = "info"
    """Least severe log lines to show."""

    @classmethod
    def combine(cls, files: Tree, flags: Tree) -> Tree:
        """A flag that says how long to train wins over what files say of it, in steps or in epochs."""
        other = {"max_steps": "epochs", "epochs": "max_steps"}
        overruled = {other[key] for key in other if key in flags} - flags.keys()
        return super().combine({key: value for key, value in files.items() if key not in overruled}, flags)

    @model_validator(mode="after")
    def _parts_fit(self) -> "OfflineConfig":
        check_lora(self.model, self.lora)
        require_held_out(self.eval, self.data)
        return self

    @model_validator(mode="after")
    def _has_one_length(self) -> "OfflineConfig":
        if self.epochs is None:
            return self
        if "max_steps" in self.model_fields_set:
            raise ValueError(
                f"max_steps = {self.max_steps} and epochs = {self.epochs:g} contradict each other; give one of them"
            )
        if self.data.streaming:
            raise ValueError(
                f"epochs = {self.epochs:g} counts rows, and data.streaming does not; give max_steps instead"
            )
        return self

    def for_rows(self, num_rows: int | None) -> Self:
        """With the number of steps that `epochs` comes to; the last step may begin another epoch."""
        if self.epochs is None or num_rows is None:
            return self
        steps = max(1, math.ceil(self.epochs * num_rows / self.batch_size))
        return self.model_copy(update={"max_steps": steps, "epochs": None})
