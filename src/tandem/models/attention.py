"""Attention over packed sequences, as the trainer needs it: causal, never across a sequence border.

Tokens lie end to end in segments. A root segment is a whole sequence, or the beginning that several sequences
share; a child segment is the rest of a sequence whose beginning is its parent. A child attends to its parent
and to itself, so that a prompt with many completions is computed once.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Rectangle:
    """Segments as rows of equal length. Padding stands to the right of queries and is masked among keys."""

    queries: Tensor  # (rows * columns,): which token each cell holds; padding repeats some token
    keys: Tensor  # (rows * key columns,)
    num_rows: int
    distances: Tensor  # (rows or 1, columns, key columns): how far back a key lies; negative: not to be seen

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """-> (rows * columns, heads, head_dim)"""
        rows_q = self._rows(q, self.queries)  # (rows, heads, columns, head_dim)
        rows_k, rows_v = self._rows(k, self.keys), self._rows(v, self.keys)
        visible = self.distances >= 0
        if window is not None:
            visible = visible & (self.distances < window)
        out = F.scaled_dot_product_attention(
            rows_q, rows_k, rows_v, attn_mask=visible[:, None], enable_gqa=q.shape[1] != k.shape[1]
        )
        return out.transpose(1, 2).reshape(-1, q.shape[1], q.shape[2])

    def _rows(self, x: Tensor, cells: Tensor) -> Tensor:
        return x.index_select(0, cells).view(self.num_rows, -1, *x.shape[1:]).transpose(1, 2)


class PackedAttention:
    """Lays segments out as rectangles for the attention kernel, roots and children apart, and flattens the result."""

    def __init__(self, lengths: Tensor, parents: Tensor | None = None) -> None:
        """lengths and parents (segments,); the parent of a root is -1, and without parents all are roots."""
        parents = torch.full_like(lengths, -1) if parents is None else parents
        starts = lengths.cumsum(0) - lengths
        self.rectangles: list[Rectangle] = []
        cells = torch.empty(int(lengths.sum()), dtype=torch.int64, device=lengths.device)
        num_cells = 0
        for is_root in (True, False):
            members = ((parents < 0) == is_root).nonzero().squeeze(-1)
            if len(members) == 0:
                continue
            columns = int(lengths[members].max())
            tokens, is_token = _grid(starts[members], lengths[members])
            if is_root:
                rectangle = _root_rectangle(tokens)
            else:
                before = parents[members]
                rectangle = _child_rectangle(tokens, *_grid(starts[before], lengths[before]), lengths[before])
            self.rectangles.append(rectangle)
            positions = torch.arange(len(members) * columns, device=lengths.device).view(len(members), columns)
            cells[tokens[is_token]] = num_cells + positions[is_token]
            num_cells += len(members) * columns
        self.cells = cells  # (tokens,): where each token lies in the joined rectangles

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        rows = [rectangle.attend(q, k, v, window) for rectangle in self.rectangles]
        joined = rows[0] if len(rows) == 1 else torch.cat(rows)
        return joined.index_select(0, self.cells)


def _grid(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Token numbers (rows, longest) of segments, and which of the cells are tokens rather than padding."""
    columns = torch.arange(int(lengths.max()), device=lengths.device)
    is_token = columns < lengths[:, None]
    return torch.where(is_token, starts[:, None] + columns, starts[:, None]), is_token


def _root_rectangle(tokens: Tensor) -> Rectangle:
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    # Padding stands to the right of every token, so causality alone keeps it out of sight.
    distances = columns[:, None] - columns[None, :]
    return Rectangle(tokens.flatten(), tokens.flatten(), len(tokens), distances[None])


def _child_rectangle(tokens: Tensor, prefix: Tensor, is_prefix: Tensor, prefix_lengths: Tensor) -> Rectangle:
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    prefix_columns = torch.arange(prefix.shape[1], device=tokens.device)
    own = (columns[:, None] - columns[None, :]).expand(len(tokens), -1, -1)
    to_prefix = prefix_lengths[:, None, None] + columns[:, None] - prefix_columns[None, None, :]
    to_prefix = torch.where(is_prefix[:, None, :], to_prefix, -1)
    keys = torch.cat((prefix, tokens), dim=1)
    return Rectangle(tokens.flatten(), keys.flatten(), len(tokens), torch.cat((to_prefix, own), dim=2))
