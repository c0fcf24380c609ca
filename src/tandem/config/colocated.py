"""Options of the process that both trains and serves (`deployment = "colocated"`)."""

from tandem.config.base import Config
from tandem.config.inference import InferenceConfig
from tandem.config.trainer import TrainerConfig


class ColocatedConfig(Config):
    """Trainer and inference server in one process."""

    trainer: TrainerConfig
    inference: InferenceConfig

    resume: bool = False
    """Continue the run, whatever trainer.resume says."""
