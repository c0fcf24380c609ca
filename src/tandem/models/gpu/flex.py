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

from tandem.models.gpu.available import is_installed
from tandem.models.gpu.blocks import BLOCK, block_tables, lists_of, sight_of
from tandem.models.runtime import to_device

LEAST_HEAD_DIM = 16  # that Triton multiplies
# There are whole blocks only, which FlexAttention cannot see where the number of tokens varies.
OPTIONS: Any = {"IS_DIVISIBLE": True}


def serves(q: Tensor) -> bool:
    """In float32 PyTorch's own kernels are as exact as the CPU's, these are not faster."""
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] >= LEAST_HEAD_DIM and is_installed()


class FlexAttention:
    """Of one packing of segments; `padding` tokens follow the last of them."""

    def __init__(
        self, lengths: NDArray[np.int64], parents: NDArray[np.int64], padding: int, device: torch.device
    ) -> None:
        self.num_tokens = int(lengths.sum()) + padding
        # A single block would need a compilation of its own: torch.compile takes sizes of one as constants.
        self.num_blocks = max(2, -(-self.num_tokens // BLOCK))
        self.sight = sight_of(lengths, parents, self.num_blocks * BLOCK)
        self.device = device
        self._lists: dict[int | None, dict[str, Tensor]] = {}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        """(tokens, heads, head_dim), like q."""
        missing = self.num_blocks * BLOCK - len(q)
        q, k, v = (F.pad(x, (0, 0, 0, 0, 0, missing)) if missing else x for x in (q, k, v))
        for x in (q, k, v):
            torch._dynamo.maybe_mark_dynamic(x, 0)
        out = _compiled()(q, k, v, self.lists(window), self.limits, window)
        return out[: self.num_tokens] if missing else out

    def lists(self, window: int | None) -> dict[str, Tensor]:
        """The lists of a BlockMask by their names."""
        if window not in self._lists:
            partial, full = block_tables(self.sight, window)
            tables = {"kv": partial, "q": partial.T, "full_kv": full, "full_q": full.T}
            self._lists[window] = {}
            for name, table in tables.items():
                counts, indices = (self._move(x) for x in lists_of(table))
                self._lists[window] |= {f"{name}_num_blocks": counts, f"{name}_indices": indices}
        return self._lists[window]

    @functools.cached_property
    def limits(self) -> tuple[Tensor, Tensor, Tensor]:
        """The sight of each token."""
        sight = self.sight
        starts, prefix_starts, prefix_ends = (
            _of_any_size(to_device(x.astype(np.int32), self.device))
            for x in (sight.starts, sight.prefix_starts, sight.prefix_ends)
        )
        return starts, prefix_starts, prefix_ends

    def _move(self, array: NDArray[np.int64]) -> Tensor:
        return _of_any_size(to_device(array.astype(np.int32)[None, None], self.device))


def _of_any_size(tensor: Tensor) -> Tensor:
    """Have torch.compile take its sizes as numbers that vary."""
    for dimension in range(tensor.ndim):
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)
    return tensor


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, lists: dict[str, Any], limits: tuple[Tensor, Tensor, Tensor], window: int | None
) -> Tensor:
    """q, k, v (tokens, heads, head_dim), like what comes back. What is compiled; the number of tokens is read off the
    tensors, so that one compilation serves them all."""
    # Not at the top: it brings SymPy, which takes half a second that nobody without a GPU needs to wait.
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mask = BlockMask(
        seq_lengths=(q.shape[2], k.shape[2]),
        **lists,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=mask_function(*limits, window),
    )
    gqa = q.shape[1] != k.shape[1]
    out: Any = flex_attention(q, k, v, block_mask=mask, enable_gqa=gqa, kernel_options=OPTIONS)
    return out[0].transpose(0, 1)


def mask_function(
    starts: Tensor, prefix_starts: Tensor, prefix_ends: Tensor, window: int | None
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """What `blocks.Sight` says of a query and a key."""
    near = window or 0

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (key >= starts[query]) & (key <= query)
        return own | ((key >= prefix_starts[query]) & (key < prefix_ends[query]))

    def sees_near(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (key >= starts[query]) & (key <= query) & (query - key < near)
        distance = query - starts[query] + prefix_ends[query] - key
        return own | ((key >= prefix_starts[query]) & (key < prefix_ends[query]) & (distance < near))

    return sees if window is None else sees_near


@functools.cache
def _compiled() -> Any:
    return torch.compile(attend_blocks)
