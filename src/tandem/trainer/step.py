"""One optimizer step: forward and backward over the micro-batches, then clip and update.

The loss is normalized by the token count of the whole step, so that the update does not depend on how
the step is cut into micro-batches.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tandem.config.sft import SFTConfig
from tandem.config.trainer import TrainerConfig
from tandem.models.attention import PackedAttention
from tandem.models.decoder import Decoder
from tandem.models.hf import load_decoder
from tandem.models.runtime import choose_device, setup_torch
from tandem.trainer.logprobs import token_logprobs
from tandem.trainer.optimizer import make_optimizer
from tandem.types.rollout import MicroBatch


@dataclass(frozen=True)
class Predictions:
    """What the model says of the tokens that carry loss, in their order."""

    logprobs: Tensor  # (loss tokens,)
    entropy: Tensor  # (loss tokens,)


# Loss summed over the tokens of one micro-batch, and sums of metrics.
MicroBatchLoss = Callable[[MicroBatch, Predictions], tuple[Tensor, dict[str, Tensor]]]


class Stepper:
    """Holds what every step needs; `step` does one."""

    def __init__(
        self,
        model: Decoder,
        optimizer: torch.optim.Optimizer,
        loss: MicroBatchLoss,
        *,
        device: torch.device,
        compute_dtype: torch.dtype,
        max_grad_norm: float,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.device = device
        self.compute_dtype = compute_dtype
        self.max_grad_norm = max_grad_norm

    def step(
        self, micro_batches: Iterable[MicroBatch], num_loss_tokens: int, temperature: float = 1.0
    ) -> dict[str, float]:
        """Update the model by the loss over `num_loss_tokens`; other metrics are means over what was computed."""
        self.optimizer.zero_grad(set_to_none=True)
        totals: dict[str, Tensor] = {}
        num_computed = 0
        for micro_batch in micro_batches:
            num_computed += micro_batch.num_loss_tokens
            predictions = self.predict(micro_batch, temperature)
            loss, metrics = self.loss(micro_batch, predictions)
            (loss / num_loss_tokens).backward()
            sums = {"loss": loss.detach(), "entropy": predictions.entropy.sum(), **metrics}
            for name, value in sums.items():
                totals[name] = totals[name] + value if name in totals else value
        grad_norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm, error_if_nonfinite=True)
        self.optimizer.step()
        loss = float(totals.pop("loss")) / num_loss_tokens
        means = {name: float(total) / num_computed for name, total in totals.items()}
        return {"loss": loss, "grad_norm": float(grad_norm), **means}

    def predict(self, micro_batch: MicroBatch, temperature: float) -> Predictions:
        """Only positions that carry loss go through the output matrix."""
        token_ids = self._to_device(micro_batch.token_ids)
        positions = self._to_device(micro_batch.positions)
        attention = PackedAttention(
            self._to_device(micro_batch.segment_lengths), self._to_device(micro_batch.segment_parents)
        )
        targets = self._to_device(micro_batch.loss_mask.nonzero()[0])
        sources = self._to_device(previous_tokens(micro_batch)[micro_batch.loss_mask])
        autocast = torch.autocast(
            self.device.type, dtype=self.compute_dtype, enabled=self.compute_dtype != torch.float32
        )
        with autocast:
            hidden = self.model(token_ids, positions, attention)
            logprobs, entropy = token_logprobs(
                hidden.index_select(0, sources), self.model.output_weight, token_ids[targets], temperature
            )
        return Predictions(logprobs, entropy)

    def _to_device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def make_stepper(config: TrainerConfig | SFTConfig, loss: MicroBatchLoss) -> Stepper:
    """Load the model and make everything a step needs, as the configuration says."""
    device = choose_device(config.device)
    setup_torch(threads=config.threads, seed=config.seed, deterministic=config.deterministic)
    model = load_decoder(config.model.name, torch.float32, device)
    return Stepper(
        model,
        make_optimizer(model, config.optimizer),
        loss,
        device=device,
        compute_dtype=getattr(torch, config.model.dtype),
        max_grad_norm=config.optimizer.max_grad_norm,
    )


def previous_tokens(micro_batch: MicroBatch) -> NDArray[np.int64]:
    """For each token the one it is predicted from: its neighbour, or the last of the beginning it shares."""
    previous = np.arange(-1, len(micro_batch.token_ids) - 1, dtype=np.int64)
    ends = micro_batch.segment_lengths.cumsum()
    starts = ends - micro_batch.segment_lengths
    is_child = micro_batch.segment_parents >= 0
    previous[starts[is_child]] = ends[micro_batch.segment_parents[is_child]] - 1
    return previous
