"""Attention over packed segments by FlexAttention: tokens as they lie, no padding but to the next block.

It is compiled once a process, for any number of tokens, by torch.compile; inductor keeps what it compiled for the next
process. The lists of blocks are made from the segments (`blocks.py`), which takes a millisecond.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tandem.models.gpu.available import is_installed
from tandem.models.gpu.blocks import BLOCK, block_tables, sight_of

LEAST_HEAD_DIM = 16  # that Triton multiplies
LISTS = tuple(
    f"{kind}{side}_{what}" for kind in ("", "full_") for side in ["kv", "q"] for what in ("num_blocks", "indices")
)


def serves(q: Tensor) -> bool:
    """In float32 PyTorch's own kernels are as exact as the CPU's, these are not faster."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] >= LEAST_HEAD_DIM and is_installed()


class FlexAttention:
    """Of one packing of segments; `padding` tokens follow the last of them."""

    def __init__(
        self, lengths: NDArray[np.int64], parents: NDArray[np.int64], padding: int, device: torch.device
    ) -> None:
        self.num_tokens = int(lengths.sum()) + padding
        self.num_blocks = -(-self.num_tokens // BLOCK)
        self.sight = sight_of(lengths, parents, self.num_blocks * BLOCK)
        self.device = device
        self._masks: dict[int | None, BlockMask] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """(tokens, heads, head_dim), like q."""
        missing = self.num_blocks * BLOCK - len(q)
        q, k, v = ((F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x).transpose(0, 1)[None] for x in (q, k, v))
        for x in (q, k, v):
            torch._dynamo.maybe_mark_dynamic(x, 2)
        mask = self.mask(window)
        lists = {name: getattr(mask, name) for name in LISTS}
        out = _compiled()(q, k, v, lists, self._moved, window)
        return out[0].transpose(0, 1)[: self.num_tokens]

    def mask(self, window: int | None) -> BlockMask:
        if window not in self._masks:
            self._masks[window] = self._make_mask(window)
        return self._masks[window]

    def _make_mask(self, window: int | None) -> BlockMask:
        partial, full = (_lists(table) for table in block_tables(self.sight, window))
        sees = mask_function(*self._moved, window)
        mask = BlockMask.from_kv_blocks(*partial, *full, BLOCK_SIZE=BLOCK, mask_mod=sees).to(self.device)
        for name in LISTS:
            tensor = getattr(mask, name)
            for dimension in range(2, tensor.ndim):
                torch._dynamo.maybe_mark_dynamic(tensor, dimension)
        return mask

    @functools.cached_property
    def _moved(self) -> tuple[Tensor, Tensor, Tensor]:
        sight = (self.sight.starts, self.sight.prefix_starts, self.sight.prefix_ends)
        starts, prefix_starts, prefix_ends = (torch.from_numpy(x.astype(np.int32)).to(self.device) for x in sight)
        for tensor in (starts, prefix_starts, prefix_ends):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return starts, prefix_starts, prefix_ends


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, lists: dict[str, Tensor], sight: tuple[Tensor, ...], window: int | None
) -> Tensor:
    """q, k, v (1, heads, tokens, head_dim). What is compiled; the number of tokens is read off the tensors, so that
    one compilation serves them all."""
    mask = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]),
        **lists,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_function(*sight, window),
    )
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])  # type: ignore[return-value]


def mask_function(
    starts: Tensor, prefix_starts: Tensor, prefix_ends: Tensor, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """What `blocks.Sight` says of a query and a key."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (key >= starts[query]) & (key <= query)
        return own | ((key >= prefix_starts[query]) & (key < prefix_ends[query]))

    def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (key >= starts[query]) & (key <= query) & (query - key < window)
        distance = query - starts[query] + prefix_ends[query] - key
        return own | ((key >= prefix_starts[query]) & (key < prefix_ends[query]) & (distance < window))

    return sees if window is None else sees_near


def _lists(table: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    """Of each block of queries, how many blocks it has and, those first, which."""
    counts = table.sum(axis=1).astype(np.int32)
    indices = np.argsort(~table, axis=1, kind="stable").astype(np.int32)
    return torch.from_numpy(counts)[None, None], torch.from_numpy(indices)[None, None]


@functools.cache
def _compiled() -> Any:
    return torch.compile(attend_blocks)
