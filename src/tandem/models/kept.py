"""Truncated sampling in the trainer: with top_p, top_k or min_p, a token is drawn from a part of the vocabulary, and
its log-prob is that among the tokens of this part. The engine says which they were (`engine/sampler.py`)."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.models.runtime import to_device

# The logit of a token that could not be drawn. Finite, also thousands of them at a low temperature: p · log p is 0.
CUT_OFF = -1e25


@dataclass(frozen=True)
class KeptSets:
    """Of predictions, one after the other: the tokens that each was drawn from."""

    starts: NDArray[np.int64]  # (predictions + 1,): where the tokens of each begin
    is_cut: Tensor  # (predictions,): False: all tokens
    rows: Tensor  # (kept tokens,): the prediction they are of
    token_ids: Tensor  # (kept tokens,)

    @classmethod
    def of(cls, counts: NDArray[np.int64], token_ids: NDArray[np.int64], device: torch.device) -> "KeptSets":
        """`counts`: how many tokens each prediction was drawn from; 0: all."""
        return cls(
            np.concatenate([[0], counts.cumsum()]),
            to_device(counts > 0, device),
            to_device(np.repeat(np.arange(len(counts)), counts), device),
            to_device(token_ids, device),
        )

    def cut(self, logits: Tensor, first: int) -> Tensor:
        """The logits (rows, vocab) of the predictions from `first` on, without those that could not be drawn. Without
        gradients they are overwritten."""
        end = first + len(logits)
        mine = slice(int(self.starts[first]), int(self.starts[end]))
        kept = self.rows[mine] - first, self.token_ids[mine]
        values, is_cut = logits[kept], self.is_cut[first:end, None]
        in_place = not torch.is_grad_enabled()  # logits of a chunk are large
        cut = logits.masked_fill_(is_cut, CUT_OFF) if in_place else logits.masked_fill(is_cut, CUT_OFF)
        return cut.index_put_(kept, values)
