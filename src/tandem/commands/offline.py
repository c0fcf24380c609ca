"""What `sft` and `align` have in common: training on a dataset."""

import math
from typing import Self

from pydantic import Field, model_validator

from tandem.config.data import DataConfig, OfflineEvalConfig, require_held_out
from tandem.config.lora import check_lora
from tandem.config.parallel import check_checkpointing
from tandem.config.shared import (
    ComputeOptions,
    LogOptions,
    MetricsConfig,
    ModelOptions,
    RunOptions,
    SeedOptions,
    StartOptions,
)
from tandem.config.slurm import SlurmOptions
from tandem.config.sources import Tree
from tandem.config.training import TrainingOptions


class OfflineConfig(
    SlurmOptions, LogOptions, ComputeOptions, StartOptions, SeedOptions, TrainingOptions, RunOptions, ModelOptions
):
    """Training on a dataset."""

    data: DataConfig
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the rows, or a fraction of one, instead of max_steps."""

    batch_size: int = Field(default=32, ge=1)
    """Rows per step. A pair is one row."""

    eval: OfflineEvalConfig = OfflineEvalConfig()
    metrics: MetricsConfig = MetricsConfig()

    @classmethod
    def combine(cls, files: Tree, flags: Tree) -> Tree:
        """A flag that says how long to train wins over what files say of it, in steps or in epochs."""
        other = {"max_steps": "epochs", "epochs": "max_steps"}
        overruled = {other[key] for key in other if key in flags} - flags.keys()
        return super().combine({key: value for key, value in files.items() if key not in overruled}, flags)

    @model_validator(mode="after")
    def _parts_fit(self) -> "OfflineConfig":
        check_lora(self.model, self.lora)
        check_checkpointing(self.model, self.parallel)
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
