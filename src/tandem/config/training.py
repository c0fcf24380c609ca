"""Options of whoever trains a model, on rollouts or on a dataset."""

from pydantic import Field

from tandem.config.base import Config
from tandem.config.lora import LoRAConfig
from tandem.config.parallel import ParallelConfig
from tandem.config.shared import OptimizerConfig, SchedulerConfig


class TrainingOptions(Config):
    """How a step is computed and what it changes."""

    tokens_per_microbatch: int = Field(default=0, ge=0)
    """Most tokens in one micro-batch. It changes memory, not the update. A pair is never split. 0: 8192, or on a GPU as
    many as its memory holds, and always room for one sequence or pair."""

    lora: LoRAConfig | None = None
    """Train a LoRA adapter. Left out: train the whole model."""

    optimizer: OptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
