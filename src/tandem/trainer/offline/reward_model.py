"""Training a reward model: its module for the stepper, and how it is loaded and published."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tandem.config.parallel import ParallelConfig
from tandem.config.shared import ModelConfig, OptimizerConfig
from tandem.models.reward_model import Scorer, new_scorer
from tandem.models.runtime import whole
from tandem.trainer.build import Publish, make_stepper
from tandem.trainer.model.language_model import Inputs
from tandem.trainer.model.step import Scores, Stepper
from tandem.trainer.model.throughput import Throughput
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.sharding import home_of


class ScoringModel(nn.Module):
    """Stands where a language model does, with a score for each target in place of its log-prob."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer

    def forward(self, inputs: Inputs, temperature: float, entropy_gradient: bool = False) -> tuple[Tensor, ...]:
        """The scores, (loss tokens,)."""
        scores = self.scorer(inputs.token_ids, inputs.positions, inputs.attention)
        scores = scores.index_select(0, inputs.sources).float()
        return (scores if inputs.spread is None else scores.index_select(0, inputs.spread),)


@dataclass(frozen=True)
class TrainedScorer:
    """A reward model in training."""

    model: ScoringModel
    optimizer: torch.optim.Optimizer
    stepper: Stepper[Scores]

    def publish(self, publish: Publish, version: int) -> None:
        """Every rank takes part in putting the weights together; the first one publishes them."""
        scorer = self.model.scorer
        parameters = {name: whole(value) for name, value in scorer.named_parameters()}
        if self.stepper.ranks.is_first:
            publish(scorer.named_tensors(parameters).items(), version)

    def throughput(self) -> Throughput:
        ranks = self.stepper.ranks
        num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        return Throughput(self.model.scorer.decoder.spec, num_parameters, ranks.device, ranks.size)


def load_trained_scorer(
    model_config: ModelConfig, optimizer_config: OptimizerConfig, parallel: ParallelConfig, ranks: Ranks, seed: int
) -> TrainedScorer:
    """The language model with a fresh head, in float32 whatever it computes in, spread as the configuration says."""
    scorer = new_scorer(model_config.name, torch.float32, home_of(parallel, ranks.device), seed)
    scorer.decoder.compute_dtype = getattr(torch, model_config.dtype)
    model = ScoringModel(scorer)
    stepper = make_stepper(model, scorer.decoder.layers, model_config, optimizer_config, parallel, ranks, Scores)
    return TrainedScorer(model, stepper.optimizer, stepper)
