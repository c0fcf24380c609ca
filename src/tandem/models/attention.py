"""Attention over packed sequences, as the trainer needs it: causal, never across a sequence border."""

import torch
from torch import Tensor
from torch.nn import functional as F


class PackedAttention:
    """Sequences lie end to end in the token dimension.

    They are laid out as rows of a padded rectangle for the attention kernel and flattened again. Padding
    stands to the right, so causality alone keeps it from being attended to.
    """

    def __init__(self, sequence_lengths: Tensor) -> None:
        lengths = sequence_lengths.to(torch.int64)
        self.num_sequences, self.longest = len(lengths), int(lengths.max())
        rows = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)
        starts = lengths.cumsum(0) - lengths
        columns = torch.arange(len(rows), device=lengths.device) - starts[rows]
        self.cells = rows * self.longest + columns  # (tokens,): where each token lies in the rectangle
        self.is_rectangle = bool((lengths == self.longest).all())

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        q, k, v = (self._to_rows(x) for x in (q, k, v))  # (sequences, heads, longest, head_dim)
        mask = None
        if window is not None and window < self.longest:
            mask = self._window_mask(window, q.device)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
        )
        flat = out.transpose(1, 2).reshape(self.num_sequences * self.longest, q.shape[1], q.shape[3])
        return flat if self.is_rectangle else flat[self.cells]

    def _to_rows(self, x: Tensor) -> Tensor:
        if not self.is_rectangle:
            padded = x.new_zeros(self.num_sequences * self.longest, *x.shape[1:])
            x = padded.index_copy(0, self.cells, x)
        return x.view(self.num_sequences, self.longest, *x.shape[1:]).transpose(1, 2)

    def _window_mask(self, window: int, device: torch.device) -> Tensor:
        positions = torch.arange(self.longest, device=device)
        distance = positions[:, None] - positions[None, :]
        return (distance >= 0) & (distance < window)
