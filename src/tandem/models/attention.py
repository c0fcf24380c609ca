"""Attention over packed sequences, as the trainer needs it: causal, never across a sequence border.

Tokens lie end to end in segments. A root segment is a whole sequence, or the beginning that several sequences
share; a child segment is the rest of a sequence whose beginning is its parent. A child attends to its parent
and to itself, so that a prompt with many completions is computed once.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from tandem.models import exact, ops
from tandem.models.cpu.kernels import Contexts, SegmentLayout
from tandem.models.gpu import equal_lengths, flex
from tandem.models.gpu.tiles import Tiles, cut, tokens_per_tile
from tandem.models.runtime import to_device

MAX_SHORT_CONTEXT = 256
# Segments share a rectangle if their lengths differ by less than a factor of the square root of two.
SIZES_PER_DOUBLING = 2


@dataclass(frozen=True)
class Rectangle:
    """Segments as rows of equal length. Padding stands to the right of queries and is masked among keys."""

    queries: Tensor  # (rows * columns,): which token each cell holds; padding repeats some token
    keys: Tensor  # (rows * key columns,)
    distances: Tensor  # (rows, columns, key columns): how far back a key lies; negative: not to be seen
    is_causal: bool  # the distances say no more than that later tokens are not seen
    masks: dict[tuple[int | None, int], Tensor] = field(default_factory=dict)  # made when first asked for

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """-> (rows * columns, heads, head_dim)"""
        num_rows, columns, _ = self.distances.shape
        _, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        k, v = (x.index_select(0, self.keys).view(num_rows, -1, num_kv_heads, head_dim).transpose(1, 2) for x in (k, v))
        q = q.index_select(0, self.queries).view(num_rows, columns, num_heads, head_dim)
        if self.is_causal and (window is None or window >= columns):
            # No mask exists here: for long sequences it would be the largest tensor of all.
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k, v, is_causal=True, enable_gqa=num_heads != num_kv_heads
            )
            return out.transpose(1, 2).reshape(num_rows * columns, num_heads, head_dim)
        # The query heads that share a key head become further queries of it: no key is repeated.
        folded = num_heads // num_kv_heads
        q = q.unflatten(2, (num_kv_heads, folded)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self._mask(window, folded, q.dtype))
        out = out.unflatten(2, (folded, columns)).permute(0, 3, 1, 2, 4)
        return out.reshape(num_rows * columns, num_heads, head_dim)

    def _mask(self, window: int | None, folded: int, dtype: torch.dtype) -> Tensor:
        """(rows, 1, folded heads * columns, key columns), added to the scores."""
        if (window, folded) not in self.masks:
            hidden = self.distances < 0
            if window is not None:
                hidden |= self.distances >= window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self.masks[window, folded] = mask.repeat(1, folded, 1)[:, None]
        return self.masks[window, folded]


class PackedAttention:
    """On a CPU, short sequences go through a kernel of ours that takes them as they lie; on a GPU, in bfloat16, all do
    through FlexAttention, or cuDNN's where they are of one length. Everything else is laid out as rectangles for
    PyTorch's."""

    def __init__(self, lengths: Tensor, parents: Tensor | None = None, padding: int = 0) -> None:
        """lengths and parents (segments,); the parent of a root is -1, and without parents all are roots. `padding`
        tokens follow the last segment: what they get is of no use, and no token attends to them."""
        self.lengths = lengths
        self.parents = torch.full_like(lengths, -1) if parents is None else parents
        self.padding = padding
        self.on_host: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None
        self.layout = _short_layout(lengths, self.parents) if lengths.device.type == "cpu" else None

    @classmethod
    def of(
        cls, lengths: NDArray[np.int64], parents: NDArray[np.int64], device: torch.device, padding: int = 0
    ) -> "PackedAttention":
        """For a batch that lies on the host, where what depends on its layout is computed."""
        attention = cls(to_device(lengths, device), to_device(parents, device), padding)
        attention.on_host = lengths, parents
        return attention

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if self.layout is not None and (out := ops.packed_attention(q, k, v, self.layout, window)) is not None:
            return out
        if flex.serves(q):
            length = self._one_length
            if length is not None and (window is None or window >= length):
                return equal_lengths.attend(q, k, v, length)
            return self.flex.attend(q, k, v, window)
        out = self.rectangles.attend(q, k, v, window)
        return F.pad(out, (0, 0, 0, 0, 0, self.padding)) if self.padding else out

    @functools.cached_property
    def flex(self) -> flex.FlexAttention:
        return flex.FlexAttention(*self._host_segments, self.padding, self.lengths.device)

    @functools.cached_property
    def _one_length(self) -> int | None:
        return equal_lengths.one_length(*self._host_segments, self.padding)

    @property
    def _host_segments(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return self.on_host or (self.lengths.cpu().numpy(), self.parents.cpu().numpy())

    @functools.cached_property
    def rectangles(self) -> "Rectangles":
        return Rectangles(self.lengths, self.parents)

    @functools.cached_property
    def exact(self) -> "ExactAttention":
        return ExactAttention(self, *self._host_segments)


class ExactAttention:
    """The same in exact mode (`exact.py`). On a GPU, the kernels above give the gradient."""

    def __init__(self, packed: PackedAttention, lengths: NDArray[np.int64], parents: NDArray[np.int64]) -> None:
        self.packed: Any = packed
        self.device = packed.lengths.device
        self.lengths = np.concatenate([lengths, np.ones(packed.padding, np.int64)])
        self.on_host = _contexts(lengths, parents, packed.padding)
        self.layout = _layout(packed.lengths, packed.parents) if self.device.type == "cpu" else None
        self.tiles: Tiles | None = None  # on a GPU, cut when the number of heads is known

    @functools.cached_property
    def contexts(self) -> Contexts:
        return Contexts(*(to_device(part, self.device) for part in self.on_host))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if self.layout is None:
            return self._attend_tiles(layer, q, k, v, window)
        if not torch.is_grad_enabled():
            return exact.attend(q, k, v, self.contexts, window)[0]
        return exact.PackedAttention.apply(q, k, v, self.contexts, self.layout, window)

    def _attend_tiles(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if self.tiles is None:
            self.tiles = self._cut(tokens_per_tile(q.shape[1], k.shape[1]))
        with torch.no_grad():
            out = exact.attend_tiles(q, k[:, None], v[:, None], self.tiles, window)
        if not torch.is_grad_enabled():
            return out
        return exact.InPlaceOf.apply(self.packed.attend(layer, q, k, v, window), out)

    def _cut(self, size: int) -> Tiles:
        rows, starts, seen = self.on_host
        owner, offset = cut(self.lengths, size)
        tokens = (self.lengths.cumsum() - self.lengths)[owner] + offset
        counts = np.minimum(self.lengths[owner] - offset, size)
        return Tiles(*(to_device(part, self.device) for part in (rows, starts[tokens], tokens, seen[tokens], counts)))


@functools.cache
def leave_uncompiled() -> None:
    """To be called before layers are compiled: there is nothing to fuse here, and the layout changes with every batch.
    Not before that, since it imports the compiler."""
    for kind in (PackedAttention, ExactAttention):
        uncompiled: Any = torch.compiler.disable(kind.attend)
        kind.attend = uncompiled


def _contexts(
    lengths: NDArray[np.int64], parents: NDArray[np.int64], padding: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """The tokens that each segment sees, end to end; of every token, where those begin and how many it sees. Padding
    sees itself."""
    starts = lengths.cumsum() - lengths
    prefixes = np.where(parents >= 0, lengths[parents], 0)
    sizes = prefixes + lengths
    offsets = sizes.cumsum() - sizes
    within = np.arange(sizes.sum()) - np.repeat(offsets, sizes)
    own = np.repeat(starts - prefixes, sizes) + within
    rows = np.where(within < np.repeat(prefixes, sizes), np.repeat(starts[parents], sizes) + within, own)
    num_tokens = int(lengths.sum())
    seen = np.arange(num_tokens) + np.repeat(prefixes - starts, lengths) + 1
    padded = np.arange(num_tokens, num_tokens + padding)
    return (
        np.concatenate([rows, padded]),
        np.concatenate([np.repeat(offsets, lengths), len(rows) + np.arange(padding)]),
        np.concatenate([seen, np.ones(padding, np.int64)]),
    )


def _short_layout(lengths: Tensor, parents: Tensor) -> SegmentLayout | None:
    """None if some context is long enough for PyTorch's kernel, which works on blocks of queries, to be faster."""
    prefix_lengths = torch.where(parents >= 0, lengths[parents], 0)
    if len(lengths) == 0 or int((lengths + prefix_lengths).max()) > MAX_SHORT_CONTEXT:
        return None
    return _layout(lengths, parents)


def _layout(lengths: Tensor, parents: Tensor) -> SegmentLayout:
    is_child = parents >= 0
    prefix_lengths = torch.where(is_child, lengths[parents], 0)
    starts = lengths.cumsum(0) - lengths
    prefix_starts = torch.where(is_child, starts[parents], 0)
    return SegmentLayout(
        *(per_segment.repeat_interleave(lengths) for per_segment in (starts, prefix_starts, prefix_lengths))
    )


class Rectangles:
    """Lays segments out as rectangles for the attention kernel, roots and children apart, those of about one length
    together, and flattens the result."""

    def __init__(self, lengths: Tensor, parents: Tensor) -> None:
        starts = lengths.cumsum(0) - lengths
        self.rectangles: list[Rectangle] = []
        cells = torch.empty(int(lengths.sum()), dtype=torch.int64, device=lengths.device)
        num_cells = 0
        sizes = lengths.clamp(min=1).log2().mul(SIZES_PER_DOUBLING).ceil()
        kinds = 2 * sizes + (parents < 0)
        for kind in kinds.unique().tolist():
            members = (kinds == kind).nonzero().squeeze(-1)
            is_root = bool(kind % 2)
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

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
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
    return Rectangle(tokens.flatten(), tokens.flatten(), distances.expand(len(tokens), -1, -1), is_causal=True)


def _child_rectangle(tokens: Tensor, prefix: Tensor, is_prefix: Tensor, prefix_lengths: Tensor) -> Rectangle:
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    prefix_columns = torch.arange(prefix.shape[1], device=tokens.device)
    own = (columns[:, None] - columns[None, :]).expand(len(tokens), -1, -1)
    to_prefix = prefix_lengths[:, None, None] + columns[:, None] - prefix_columns[None, None, :]
    to_prefix = torch.where(is_prefix[:, None, :], to_prefix, -1)
    keys = torch.cat((prefix, tokens), dim=1)
    return Rectangle(tokens.flatten(), keys.flatten(), torch.cat((to_prefix, own), dim=2), is_causal=False)
