"""Options of the process that both trains and serves (`deployment = "colocated"`)."""

from tandem.config.base import Config
from tandem.config.inference import InferenceConfig
from tandem.config.trainer import TrainerConfig


class CacheOptions(Config):
    """What trainer and engine in one process agree on."""

    release_cache: bool | None = None
    """Give the memory of the KV cache to the trainer while it computes gradients, and take it back after; requests wait
    meanwhile. Only with deployment = "colocated". None: if, on a GPU, a micro-batch does not fit beside the cache."""


class ColocatedConfig(CacheOptions):
    """Trainer and inference server in one process."""

    trainer: TrainerConfig
    inference: InferenceConfig

    resume: bool = False
    """Continue the run, whatever trainer.resume says."""
