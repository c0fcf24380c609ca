"""Decoding on CUDA as one graph launch: no Python and no kernel launches inside the step.

A graph replays fixed shapes on fixed buffers, so steps are rounded up to a bucket of rows and a bucket of context.
Padding rows write to a block that belongs to nobody, and nobody reads what they give. Weights change in place, so
graphs stay true when they do.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from tandem.inference.native.attention import KVCache
from tandem.models.decoder import Decoder

WARM_UPS = 2  # kernels choose their plans and allocate their workspaces before a graph is recorded


@dataclass(frozen=True)
class Buffers:
    """What a step is told, at addresses that never change."""

    token_ids: Tensor  # (rows,)
    positions: Tensor  # (rows,)
    write_to: Tensor  # (rows,): cache row of each token
    blocks: Tensor  # (rows, blocks)


class DecodeAttention:
    """The attention context of a step in which every row has one token. Nothing in it depends on values that only
    the host knows."""

    def __init__(self, cache: KVCache, buffers: Buffers) -> None:
        self.cache = cache
        self.buffers = buffers
        self._masks: dict[int | None, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        rows, num_heads, head_dim = q.shape
        num_kv_heads = k.shape[1]
        self.cache.key_rows[layer].index_copy_(0, self.buffers.write_to, k)
        self.cache.value_rows[layer].index_copy_(0, self.buffers.write_to, v)
        blocks = self.buffers.blocks.flatten()
        keys, values = (
            part[layer].index_select(0, blocks).view(rows, -1, num_kv_heads, head_dim).transpose(1, 2)
            for part in (self.cache.key_blocks, self.cache.value_blocks)
        )
        # The query heads that share a KV head become further queries of it: no key is ever repeated.
        q = q.view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=self._mask(window, keys.shape[2], q.dtype))
        return out.reshape(rows, num_heads, head_dim)

    def _mask(self, window: int | None, context: int, dtype: torch.dtype) -> Tensor:
        """(rows, 1, 1, context)"""
        if window not in self._masks:
            distance = self.buffers.positions[:, None] - torch.arange(context, device=self.buffers.positions.device)
            visible = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
            mask = torch.zeros_like(visible, dtype=dtype).masked_fill(~visible, -torch.inf)
            self._masks[window] = mask[:, None, None]
        return self._masks[window]


class DecodeGraphs:
    """One recorded step for each bucket, made when first needed."""

    def __init__(self, decoder: Decoder, cache: KVCache, device: torch.device) -> None:
        """The last block of `cache` must be one that no sequence is ever given."""
        self.decoder = decoder
        self.cache = cache
        self.device = device
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Buffers, Tensor]] = {}
        self._memory: Any = None  # shared by all graphs, which never run side by side

    def forward(
        self,
        token_ids: NDArray[np.int64],
        positions: NDArray[np.int64],
        write_to: NDArray[np.int64],
        table: NDArray[np.int64],
    ) -> Tensor:
        """Logits (rows, vocab) of rows with one token each; true until the next call."""
        key = bucket(len(token_ids)), bucket(table.shape[1])
        if key not in self._graphs:
            self._graphs[key] = self._record(*key)
        graph, buffers, logits = self._graphs[key]
        self._fill(buffers, token_ids, positions, write_to, table)
        graph.replay()
        return logits[: len(token_ids)]

    def _record(self, num_rows: int, num_blocks: int) -> tuple[torch.cuda.CUDAGraph, Buffers, Tensor]:
        buffers = self._new_buffers(num_rows, num_blocks)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(WARM_UPS):
                self._step(buffers)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            logits = self._step(buffers)
        self._memory = self._memory or graph.pool()
        return graph, buffers, logits

    def _step(self, buffers: Buffers) -> Tensor:
        context = DecodeAttention(self.cache, buffers)
        return self.decoder.logits(self.decoder(buffers.token_ids, buffers.positions, context))

    def _new_buffers(self, num_rows: int, num_blocks: int) -> Buffers:
        _, cache_blocks, block_size, _, _ = self.cache.shape
        nobodys = cache_blocks - 1
        return Buffers(
            token_ids=torch.zeros(num_rows, dtype=torch.int64, device=self.device),
            positions=torch.zeros(num_rows, dtype=torch.int64, device=self.device),
            write_to=torch.full((num_rows,), nobodys * block_size, dtype=torch.int64, device=self.device),
            blocks=torch.full((num_rows, num_blocks), nobodys, dtype=torch.int64, device=self.device),
        )

    def _fill(self, buffers: Buffers, *arrays: NDArray[np.int64]) -> None:
        """Rows past the given ones become padding again."""
        nobodys = self.cache.shape[1] - 1
        fills = (0, 0, nobodys * self.cache.shape[2], nobodys)
        targets = (buffers.token_ids, buffers.positions, buffers.write_to, buffers.blocks)
        for target, array, fill in zip(targets, arrays, fills, strict=True):
            whole = np.full(target.shape, fill, np.int64)
            whole[tuple(slice(size) for size in array.shape)] = array
            target.copy_(torch.from_numpy(whole).pin_memory(), non_blocking=True)


def bucket(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
