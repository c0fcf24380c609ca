"""One optimizer step: forward and backward over the micro-batches of this rank, then clip and update.

The loss is divided by a count of the whole step, over all ranks, so that the update does not depend on how
the step is cut into micro-batches, nor on the world size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tandem.config.parallel import ParallelConfig
from tandem.models.runtime import whole
from tandem.trainer.losses.types import LossOutput
from tandem.trainer.model.language_model import Inputs
from tandem.trainer.parallel.ranks import Ranks
from tandem.trainer.parallel.sharding import add_gradients, is_sharded
from tandem.types.rollout import PackedBatch

# Metrics are sums over tokens, but for maxima and parts of the loss.
MAXIMUM, LOSS = "max/", "loss"


@dataclass(frozen=True)
class Predictions:
    """What the model says of the tokens that carry loss, in their order."""

    logprobs: Tensor  # (loss tokens,)
    entropy: Tensor  # (loss tokens,)
    values: Tensor | None = None  # (loss tokens,), where there is a critic


# The loss summed over one micro-batch, with its metrics.
MicroBatchLoss = Callable[[PackedBatch, Predictions], LossOutput]


class Stepper:
    """Holds what every step needs; `step` does one."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        ranks: Ranks,
        parallel: ParallelConfig,
        *,
        max_grad_norm: float,
        entropy_gradient: bool = False,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.ranks = ranks
        self.parallel = parallel
        self.is_sharded = is_sharded(parallel, ranks)
        self.max_grad_norm = max_grad_norm
        self.entropy_gradient = entropy_gradient

    def step(
        self, micro_batches: Sequence[PackedBatch], loss: MicroBatchLoss, denominator: float, temperature: float = 1.0
    ) -> dict[str, float]:
        """Update the model by the loss over `denominator`; other metrics are means over the tokens computed."""
        self.optimizer.zero_grad(set_to_none=True)
        totals = Totals()
        # FSDP takes the mean over ranks; what is wanted is the sum.
        scale = (self.ranks.size if self.is_sharded else 1) / denominator
        for micro_batch in micro_batches:
            predictions = self.predict(micro_batch, temperature)
            output = loss(micro_batch, predictions)
            (output.loss * scale).backward()
            totals.add(micro_batch, predictions, output)
        if self.ranks.size > 1 and not self.is_sharded:
            add_gradients(self.model.parameters(), self.ranks)
        grad_norm = whole(
            nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm, error_if_nonfinite=True)
        )
        self.optimizer.step()
        return totals.over_ranks(self.ranks, denominator) | {"grad_norm": float(grad_norm)}

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[PackedBatch], loss: MicroBatchLoss, denominator: float
    ) -> dict[str, float]:
        """The loss over `denominator` and the metrics beside it, without an update."""
        totals = Totals()
        for micro_batch in micro_batches:
            predictions = self.infer(micro_batch)
            totals.add(micro_batch, predictions, loss(micro_batch, predictions))
        return totals.over_ranks(self.ranks, denominator)

    @torch.no_grad()
    def infer(self, micro_batch: PackedBatch, temperature: float = 1.0) -> Predictions:
        """What the model says without learning from it: no gradient, no dropout."""
        self.model.eval()
        try:
            return self.predict(micro_batch, temperature)
        finally:
            self.model.train()

    def predict(self, micro_batch: PackedBatch, temperature: float = 1.0) -> Predictions:
        inputs = Inputs.of(micro_batch, self.ranks.device)
        return Predictions(*self.model(inputs, temperature, self.entropy_gradient))


class Totals:
    """Sums and maxima of metrics over the micro-batches of a step, then over the ranks."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._num_tokens = 0

    def add(self, micro_batch: PackedBatch, predictions: Predictions, output: LossOutput) -> None:
        self._num_tokens += micro_batch.num_loss_tokens
        metrics = {"loss": output.loss, "entropy": predictions.entropy.sum(), **output.metrics}
        for name, value in metrics.items():
            value = value.detach().double()
            if name not in self._values:
                self._values[name] = value
            elif name.startswith(MAXIMUM):
                self._values[name] = torch.maximum(self._values[name], value)
            else:
                self._values[name] = self._values[name] + value

    def over_ranks(self, ranks: Ranks, denominator: float) -> dict[str, float]:
        sums = {name: value for name, value in self._values.items() if not name.startswith(MAXIMUM)}
        maxima = {name: value for name, value in self._values.items() if name.startswith(MAXIMUM)}
        counted = torch.stack([*sums.values(), torch.as_tensor(self._num_tokens).to(sums["loss"])])
        *totals, num_tokens = ranks.all_sum(counted).tolist()
        largest = ranks.all_max(torch.stack(list(maxima.values()))).tolist() if maxima else []
        counts = {name: denominator if name.startswith(LOSS) else max(1, num_tokens) for name in sums}
        means = {name: total / counts[name] for name, total in zip(sums, totals, strict=True)}
        return means | dict(zip(maxima, largest, strict=True))
