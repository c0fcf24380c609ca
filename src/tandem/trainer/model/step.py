"""One optimizer step: forward and backward over the micro-batches of this rank, then clip and update.

The loss is divided by a count of the whole step, over all ranks, so that the update does not depend on how
the step is cut into micro-batches, nor on the world size.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from tandem.algorithms.losses.kind import LossOutput
from tandem.algorithms.metrics import Metric, loss_part, mean_of
from tandem.config.parallel import ParallelConfig
from tandem.models.runtime import whole
from tandem.trainer.model.language_model import Inputs
from tandem.trainer.model.totals import StepMetrics, Totals
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.sharding import add_gradients, is_sharded
from tandem.types.rollout import PackedBatch
from tandem.utils.errors import Diverged, OutOfMemory


@dataclass(frozen=True)
class Predictions:
    """What the model says of the tokens that carry loss, in their order."""

    logprobs: Tensor  # (loss tokens,)
    entropy: Tensor  # (loss tokens,)
    values: Tensor | None = None  # (loss tokens,), where there is a critic

    @property
    def metrics(self) -> dict[str, Metric]:
        return {"entropy": mean_of(self.entropy)}


@dataclass(frozen=True)
class Scores:
    """What a reward model says of them."""

    scores: Tensor  # (loss tokens,)

    @property
    def metrics(self) -> dict[str, Metric]:
        return {}


P = TypeVar("P", Predictions, Scores)
# The loss summed over one micro-batch, with its metrics.
MicroBatchLoss = Callable[[PackedBatch, P], LossOutput]


class Stepper(Generic[P]):
    """Holds what every step needs; `step` does one."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        parallel: ParallelConfig,
        predictions: type[P],
        *,
        max_grad_norm: float,
        entropy_gradient: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.ranks = ranks
        self.parallel = parallel
        self.predictions = predictions
        self.is_sharded = is_sharded(parallel, ranks)
        self.max_grad_norm = max_grad_norm
        self.entropy_gradient = entropy_gradient
        self.leaves_update = False  # to whoever publishes the weights (`weights/in_place.py`)

    def step(
        self,
        micro_batches: Sequence[PackedBatch],
        loss: MicroBatchLoss[P],
        denominator: float,
        temperature: float = 1.0,
    ) -> StepMetrics:
        """Update the model by the loss over `denominator`; where the update is left to others, its gradients only."""
        self.optimizer.zero_grad(set_to_none=True)
        totals = Totals()
        # FSDP takes the mean over ranks; what is wanted is the sum.
        scale = (self.ranks.size if self.is_sharded else 1) / denominator
        for micro_batch in micro_batches:
            predictions = self.predict(micro_batch, temperature)
            output = loss(micro_batch, predictions)
            (output.loss * scale).backward()
            totals.add({"loss": loss_part(output.loss)} | predictions.metrics | output.metrics)
        if self.ranks.size > 1 and not self.is_sharded:
            add_gradients(self.model.parameters(), self.ranks)
        grad_norm = float(whole(nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)))
        if not math.isfinite(grad_norm):
            raise Diverged(
                f"the gradient norm is {grad_norm}, and nothing was updated: training diverges. Lower optimizer.lr, "
                "and go on from a checkpoint before it began"
            )
        try:
            if not self.leaves_update:
                self.optimizer.step()
        except torch.OutOfMemoryError as error:  # some weights may be updated: nothing to be tried again
            raise OutOfMemory(f"no memory for the optimizer's state; set parallel.optimizer_offload. {error}") from None
        metrics = totals.over_ranks(self.ranks, denominator)
        metrics["grad_norm"] = grad_norm
        return metrics

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[PackedBatch], loss: MicroBatchLoss[P], denominator: float
    ) -> StepMetrics:
        """The loss over `denominator` and its metrics, without an update."""
        totals = Totals()
        for micro_batch in micro_batches:
            predictions = self.infer(micro_batch)
            output = loss(micro_batch, predictions)
            totals.add({"loss": loss_part(output.loss)} | predictions.metrics | output.metrics)
        return totals.over_ranks(self.ranks, denominator)

    @torch.no_grad()
    def infer(self, micro_batch: PackedBatch, temperature: float = 1.0) -> P:
        """What the model says without learning from it: no gradient, no dropout."""
        self.model.eval()
        try:
            return self.predict(micro_batch, temperature)
        finally:
            self.model.train()

    def predict(self, micro_batch: PackedBatch, temperature: float = 1.0) -> P:
        inputs = Inputs.of(micro_batch, self.ranks.device)
        return self.predictions(*self.model(inputs, temperature, self.entropy_gradient))
