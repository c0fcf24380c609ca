"""A model that is asked and not trained: the reference that a policy is kept near, or the teacher it learns from."""

from pathlib import Path

import torch
from torch import Tensor

from tandem.config.parallel import ParallelConfig
from tandem.config.shared import Impl, ModelConfig
from tandem.models.trainable import load_model
from tandem.trainer.model import Inputs, LanguageModel
from tandem.trainer.ranks import Ranks
from tandem.trainer.sharding import home_of, prepare
from tandem.types.rollout import PackedBatch


class FrozenModel:
    """In the precision it computes in, and spread over the ranks as the trained one is."""

    def __init__(
        self, model_dir: Path, dtype: torch.dtype, parallel: ParallelConfig, ranks: Ranks, impl: Impl = "native"
    ) -> None:
        self.device = ranks.device
        home = home_of(parallel, ranks.device)
        decoder = load_model(ModelConfig(name=model_dir, impl=impl), dtype, home).requires_grad_(False)
        self.model = LanguageModel(decoder)
        prepare(self.model, decoder.layers, parallel.model_copy(update={"gradient_checkpointing": 0}), ranks, dtype)

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
        """(loss tokens,), in the order of `batch.targets`."""
        return self.model(Inputs.of(batch, self.device), temperature)[0]
