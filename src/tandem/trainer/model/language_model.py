"""The model as the trainer uses it: log-probs of given tokens, entropy and, with a critic, values.

All in one forward pass of one module: under sharding, weights are whole only there.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tandem.data.packing import take_kept
from tandem.models import ops
from tandem.models.attention import PackedAttention
from tandem.models.gpu.blocks import BLOCK
from tandem.models.kept import KeptSets
from tandem.models.runtime import to_device
from tandem.trainer.model.logprobs import token_logprobs
from tandem.types.rollout import PackedBatch


@dataclass(frozen=True)
class Inputs:
    """A packed batch on the device."""

    token_ids: Tensor  # (tokens,), on a GPU padded to a whole number of blocks
    positions: Tensor  # (tokens,)
    attention: PackedAttention
    labels: Tensor  # (predictions,): the token that is predicted
    sources: Tensor  # (predictions,): where the token stands that it is predicted from
    spread: Tensor | None  # (loss tokens,): the prediction that each learned token takes; None: one each, in order
    kept: KeptSets | None = None  # kept tokens of the predictions; None: sampled without truncation

    @classmethod
    def of(cls, batch: PackedBatch, device: torch.device) -> "Inputs":
        def move(array: NDArray[Any]) -> Tensor:
            return to_device(array, device)

        # Kernels of a GPU work on blocks of tokens, and what is compiled for whole blocks serves all batches.
        padding = -batch.num_tokens % BLOCK if device.type == "cuda" else 0

        # Sequences that are the same are there once, and so is what is predicted of them.
        targets, spread = np.unique(batch.targets, return_inverse=True)
        kept = None if batch.kept is None else take_kept(batch.kept, targets)
        return cls(
            move(np.pad(batch.token_ids, (0, padding))),
            move(np.pad(batch.positions, (0, padding))),
            PackedAttention.of(batch.segment_lengths, batch.segment_parents, device, padding),
            move(batch.token_ids[targets]),
            move(previous_tokens(batch)[targets]),
            None if np.array_equal(spread, np.arange(len(targets))) else move(spread),
            None if kept is None else KeptSets.of(kept.counts, kept.token_ids, device),
        )


class LanguageModel(nn.Module):
    """`decoder` with its output matrix applied to the positions that carry loss, and to no others.

    With a value head it is a critic as well: it predicts the return from each token on, before the token is sampled.
    `keep_logits`: for the backward pass, as far as there is room.
    """

    def __init__(self, decoder: nn.Module, value_head: nn.Linear | None = None, *, keep_logits: bool = True) -> None:
        super().__init__()
        self.decoder = decoder
        self.value_head = value_head
        self.keep_logits = keep_logits

    def forward(self, inputs: Inputs, temperature: float, entropy_gradient: bool = False) -> tuple[Tensor, ...]:
        """Of each target, (loss tokens,): its log-prob, the entropy it was drawn with, its value where there is one."""
        batch_invariant = bool(self.decoder.exact)
        attention = inputs.attention.exact if batch_invariant else inputs.attention
        hidden = self.decoder(inputs.token_ids, inputs.positions, attention).index_select(0, inputs.sources)
        logprobs, entropy = token_logprobs(
            hidden,
            self.decoder.output_weight,  # type: ignore[arg-type]
            inputs.labels,
            temperature,
            entropy_gradient=entropy_gradient,
            batch_invariant=batch_invariant,
            keep_logits=self.keep_logits,
            kept=inputs.kept,
        )
        # A sum over one column instead of a view of it: FSDP wants outputs that are not views.
        head = self.value_head
        values = () if head is None else (ops.linear(hidden, head.weight, head.bias, None).float().sum(dim=-1),)
        outputs = (logprobs, entropy, *values)
        return outputs if inputs.spread is None else tuple(out.index_select(0, inputs.spread) for out in outputs)


def previous_tokens(batch: PackedBatch) -> NDArray[np.int64]:
    """For each token the one it is predicted from: its neighbour, or the last of the beginning it shares."""
    previous = np.arange(-1, batch.num_tokens - 1, dtype=np.int64)
    ends = batch.segment_lengths.cumsum()
    starts = ends - batch.segment_lengths
    is_child = batch.segment_parents >= 0
    previous[starts[is_child]] = ends[batch.segment_parents[is_child]] - 1
    return previous
