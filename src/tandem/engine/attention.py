"""Attention over the paged KV cache, as the engine needs it.

The tokens of a step are split into pieces: consecutive tokens of one sequence, one for a sequence that
decodes, up to a tile's worth for one that prefills. Pieces of similar size are stacked into a group,
and a group is one gather from the cache and one attention kernel call in each layer.

    tokens of a step     d d d d p p p p p p q q q        d: decode, p and q: two prompts
    groups               [d d d d] [p p p p p p | q q q . . .]
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from tandem.engine.kv_cache import KVCache, to_device
from tandem.models import exact
from tandem.models.cpu import kernels
from tandem.models.cpu.kernels import Contexts, Kernels

QUERY_TILE = 256  # most consecutive prompt tokens in one piece
SMALL_CONTEXT_BITS = 7  # contexts below 2**7 tokens are not worth telling apart
MAX_MASK_ELEMENTS = 1 << 23  # bounds the memory of one kernel call


@dataclass
class AttentionGroup:
    """Pieces stacked into a rectangle of `num_pieces` × `num_queries` tokens."""

    tokens: slice | Tensor  # which tokens of the step, in order of pieces
    cells: Tensor | None  # where in the rectangle each lies; None: they fill it
    num_pieces: int
    num_queries: int
    blocks: Tensor  # (pieces × blocks,), padded to the longest context
    query_positions: Tensor  # (pieces, queries)
    masks: dict[int | None, Tensor]  # by window, made when first asked for

    def mask(self, window: int | None, context: int, folded_heads: int, dtype: torch.dtype) -> Tensor:
        """(pieces, 1, heads of one KV head × queries, context): what each query may see."""
        if window not in self.masks:
            distance = self.query_positions[:, :, None] - torch.arange(context, device=self.blocks.device)
            visible = distance >= 0
            if window is not None:
                visible &= distance < window
            # Added to the scores: PyTorch would convert a mask of booleans to this one in every layer.
            mask = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -torch.inf)
            self.masks[window] = mask.repeat(1, folded_heads, 1)[:, None]
        return self.masks[window]


@dataclass(frozen=True)
class DecodingRows:
    """The first tokens of a step, where each is the next one of another sequence, for a kernel that reads the cache
    where it lies."""

    kernels: Kernels
    tables: Tensor  # (rows, blocks of the longest)
    positions: Tensor  # (rows,)

    def attend(
        self, cache: KVCache, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor, window: int | None
    ) -> None:
        keys, values = cache.keys[layer], cache.values[layer]
        self.kernels.decode_attention(q, k, v, keys, values, self.tables, self.positions, out, window)


class PagedAttention:
    """The attention context of one step."""

    def __init__(
        self, cache: KVCache, write_to: Tensor, groups: list[AttentionGroup], decoding: DecodingRows | None = None
    ) -> None:
        """`groups` hold the tokens that come after those of `decoding`."""
        self.cache = cache
        self.write_to = write_to  # (tokens,): cache row of each token
        self.groups = groups
        self.decoding = decoding

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if self.decoding is None:
            return self._attend_groups(layer, q, k, v, window)
        out = torch.empty_like(q)
        count = len(self.decoding.positions)
        self.decoding.attend(self.cache, layer, q[:count], k[:count], v[:count], out[:count], window)
        if count < len(q):
            out[count:] = self._attend_groups(layer, q[count:], k[count:], v[count:], window)
        return out

    def _attend_groups(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        self.cache.key_rows[layer].index_copy_(0, self.write_to, k)
        self.cache.value_rows[layer].index_copy_(0, self.write_to, v)
        if len(self.groups) == 1 and self.groups[0].cells is None:
            return self._attend_group(self.groups[0], layer, q, window)
        out = torch.empty_like(q)
        for group in self.groups:
            out[group.tokens] = self._attend_group(group, layer, q[group.tokens], window)
        return out

    def _attend_group(self, group: AttentionGroup, layer: int, q: Tensor, window: int | None) -> Tensor:
        """q (tokens of the group, heads, head_dim) -> the same shape."""
        pieces, queries = group.num_pieces, group.num_queries
        _, num_heads, head_dim = q.shape
        num_kv_heads = self.cache.shape[3]
        folded = num_heads // num_kv_heads
        if group.cells is not None:
            q = q.new_zeros(pieces * queries, num_heads, head_dim).index_copy_(0, group.cells, q)
        # The query heads that share a KV head become further queries of it: no key is ever repeated.
        q = q.reshape(pieces, queries, num_kv_heads, folded, head_dim).permute(0, 2, 3, 1, 4)
        q = q.reshape(pieces, num_kv_heads, folded * queries, head_dim)
        keys, values = self.cache.gather(layer, group.blocks)
        keys = keys.view(pieces, -1, num_kv_heads, head_dim).transpose(1, 2)
        values = values.view(pieces, -1, num_kv_heads, head_dim).transpose(1, 2)
        mask = group.mask(window, keys.shape[2], folded, q.dtype)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        out = out.view(pieces, num_kv_heads, folded, queries, head_dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(pieces * queries, num_heads, head_dim)
        return out if group.cells is None else out[group.cells]


class PagedExactAttention:
    """The attention context of one step in exact mode (`models/exact.py`): decoding or prefilling, every token looks at
    its sequence by itself."""

    def __init__(self, cache: KVCache, write_to: Tensor, contexts: Contexts) -> None:
        self.cache = cache
        self.write_to = write_to  # (tokens,): cache row of each token
        self.contexts = contexts

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        keys, values = self.cache.key_rows[layer], self.cache.value_rows[layer]
        keys.index_copy_(0, self.write_to, k)
        values.index_copy_(0, self.write_to, v)
        return exact.attend(q, keys, values, self.contexts, window)[0]


@dataclass(frozen=True)
class Pieces:
    """Consecutive tokens of one sequence each: from position `start`, `count` of them."""

    table: NDArray[np.int64]  # (pieces, blocks of the longest sequence)
    start: NDArray[np.int64]
    count: NDArray[np.int64]

    @property
    def end(self) -> NDArray[np.int64]:
        return self.start + self.count


def split_chunks(table: NDArray[np.int64], start: NDArray[np.int64], count: NDArray[np.int64]) -> Pieces:
    """Chunks of prompts cut into pieces of at most a tile; the tokens stay in order."""
    if len(count) == 0 or count.max() <= QUERY_TILE:
        return Pieces(table, start, count)
    tiles = -(-count // QUERY_TILE)
    owner = np.repeat(np.arange(len(count)), tiles)
    offset = (np.arange(len(owner)) - np.repeat(tiles.cumsum() - tiles, tiles)) * QUERY_TILE
    return Pieces(table[owner], start[owner] + offset, np.minimum(count[owner] - offset, QUERY_TILE))


def make_groups(pieces: Pieces, block_size: int, device: torch.device) -> list[AttentionGroup]:
    """Stack pieces of similar length and context; a rectangle is never mostly padding."""
    size_class = _bits(pieces.count) * 64 + np.maximum(_bits(pieces.end), SMALL_CONTEXT_BITS)
    first_token = pieces.count.cumsum() - pieces.count
    groups = []
    for members in _classes(size_class):
        queries, context = pieces.count[members].max(), pieces.end[members].max()
        per_call = max(1, MAX_MASK_ELEMENTS // int(queries * context))
        for start in range(0, len(members), per_call):
            part = members[start : start + per_call]
            groups.append(_make_group(pieces, part, first_token, block_size, device))
    return groups


def _make_group(
    pieces: Pieces,
    members: NDArray[np.int64],
    first_token: NDArray[np.int64],
    block_size: int,
    device: torch.device,
) -> AttentionGroup:
    count, start = pieces.count[members], pieces.start[members]
    num_queries = int(count.max())
    num_blocks = -(-int(pieces.end[members].max()) // block_size)
    columns = np.arange(num_queries)
    inside = columns < count[:, None]  # (pieces, queries)
    positions = np.where(inside, start[:, None] + columns, 0)
    tokens = (first_token[members][:, None] + columns)[inside]
    whole = len(tokens) == inside.size
    in_one_run = len(tokens) == tokens[-1] - tokens[0] + 1 and bool((np.diff(tokens) == 1).all())
    return AttentionGroup(
        tokens=slice(int(tokens[0]), int(tokens[-1]) + 1) if in_one_run else torch.from_numpy(tokens).to(device),
        cells=None if whole else torch.from_numpy(np.flatnonzero(inside)).to(device),
        num_pieces=len(members),
        num_queries=num_queries,
        blocks=torch.from_numpy(pieces.table[members, :num_blocks].ravel()).to(device),
        query_positions=torch.from_numpy(positions).to(device),
        masks={},
    )


def plan_attention(
    cache: KVCache,
    table: NDArray[np.int64],
    start: NDArray[np.int64],
    count: NDArray[np.int64],
    write_to: NDArray[np.int64],
) -> PagedAttention:
    """The attention of a step that computes the next `count` tokens of each row, from position `start` on."""
    device, block_size = cache.keys.device, cache.shape[2]
    fast = kernels.find(cache.keys)
    num_decoding = 0
    if fast is not None and cache.shape[4] % kernels.LANES == 0 and cache.shape[4] <= kernels.MAX_HEAD_DIM:
        longer = np.flatnonzero(count > 1)
        num_decoding = int(longer[0]) if len(longer) else len(count)
    groups: list[AttentionGroup] = []
    if num_decoding < len(count):
        pieces = split_chunks(table[num_decoding:], start[num_decoding:], count[num_decoding:])
        groups = make_groups(pieces, block_size, device)
    decoding = None
    if fast is not None and num_decoding:
        tables = torch.from_numpy(np.ascontiguousarray(table[:num_decoding]))
        decoding = DecodingRows(fast, tables, torch.from_numpy(start[:num_decoding]))
    return PagedAttention(cache, torch.from_numpy(write_to[num_decoding:]).to(device), groups, decoding)


def plan_exact_attention(
    cache: KVCache,
    table: NDArray[np.int64],
    start: NDArray[np.int64],
    count: NDArray[np.int64],
    write_to: NDArray[np.int64],
) -> PagedExactAttention:
    """The same in exact mode."""
    device, block_size = cache.keys.device, cache.shape[2]
    rows = (table[:, :, None] * block_size + np.arange(block_size)).ravel()
    starts = np.repeat(np.arange(len(table)) * table.shape[1] * block_size, count)
    seen = np.arange(count.sum()) + np.repeat(start - (count.cumsum() - count), count) + 1
    contexts = Contexts(*(to_device(part, device) for part in (rows, starts, seen)))
    return PagedExactAttention(cache, to_device(write_to, device), contexts)


def _bits(values: NDArray[np.int64]) -> NDArray[np.int64]:
    """Bit length: values within a factor of two of each other mostly agree in it."""
    return np.frexp(values.astype(np.float64))[1].astype(np.int64)


def _classes(keys: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """Indices of equal keys, together."""
    if (keys == keys[0]).all():
        return [np.arange(len(keys))]
    return [np.flatnonzero(keys == key) for key in np.unique(keys)]
