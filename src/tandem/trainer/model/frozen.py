"""A frozen model: the reference model that the policy is kept near, or the teacher model it learns from."""

import torch
from torch import Tensor

from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig
from tandem.models.trainable import load_frozen, make_batch_invariant
from tandem.trainer.model.language_model import Inputs, LanguageModel
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.sharding import home_of, prepare
from tandem.types.rollout import PackedBatch


class FrozenModel:
    """Computes as the trained one does, and is spread over the ranks like it."""

    def __init__(
        self, model: ModelConfig, parallel: ParallelConfig, ranks: Ranks, *, batch_invariant: bool = False
    ) -> None:
        self.device = ranks.device
        decoder = load_frozen(model, home_of(parallel, ranks.device))
        if batch_invariant:
            make_batch_invariant(decoder, ranks.device)
        self.model = LanguageModel(decoder)
        parallel = parallel.model_copy(update={"gradient_checkpointing": 0})
        prepare(self.model, decoder.layers, parallel, ranks, getattr(torch, model.dtype))

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
        """(loss tokens,), in the order of `batch.targets`."""
        return self.model(Inputs.of(batch, self.device), temperature)[0]
