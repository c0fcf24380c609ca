"""Options of the process that both trains and serves (`deployment = "colocated"`)."""

from tandem.commands.trainer import TrainerConfig
from tandem.config.base import Config
from tandem.config.inference import InferenceConfig


class CacheOptions(Config):
    """What trainer and engine in one process agree on."""

    release_cache: bool | None = None
    """Give the memory of the KV cache to the trainer while it computes gradients, and take it back after; requests wait
    meanwhile. Only with deployment = "colocated". None: if, on a GPU, a micro-batch does not fit next to the cache."""


class ColocatedConfig(CacheOptions):
    """Trainer and inference server in one process."""

    trainer: TrainerConfig
    inference: InferenceConfig

    resume: bool = False
    """Continue the run, whatever trainer.resume says."""


def why_copied(trainer: TrainerConfig, inference: InferenceConfig) -> str | None:
    """Why the engine cannot compute with the trainer's own weights; None: it can."""
    if (trainer.model, trainer.device) != (inference.model, inference.device):
        return "trainer and inference differ in model or device"
    if trainer.model.impl != "native":
        return f"model.impl = {trainer.model.impl!r}"
    if trainer.parallel.ranks > 1 or trainer.parallel.strategy == "zero3_offload":
        return "those are divided among ranks, or lie in CPU memory"
    if trainer.sync_every > 1:
        return f"sync_every = {trainer.sync_every}"
    if trainer.lora is None and trainer.updates_per_batch * trainer.epochs_per_batch > 1:
        return "there are several updates per batch, and the weights between two of them are no version"
    return None
