"""Keys and values of all layers: where they lie, how blocks are copied and gathered, and how their memory is lent."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.engine.cache_memory import CacheMemory, StorageMemory


class KVCache:
    """Keys and values of all layers, in blocks; one row of `keys[layer]` is one token's."""

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        heads_first: bool = False,
        memory: CacheMemory | None = None,
    ) -> None:
        """`heads_first`: the tokens of a block lie together by KV head, as the kernels of a GPU like it; `keys` and
        `values` have the same shape, but there are no rows and no flat blocks. `memory`: where another than PyTorch's
        usual one is asked for."""
        self._memory = memory or StorageMemory()
        self.is_released = False
        self.shape = (num_layers, num_blocks, block_size, num_kv_heads, head_dim)
        self._gathered = (torch.empty(0, dtype=dtype, device=device), torch.empty(0, dtype=dtype, device=device))
        if heads_first:
            shape = (num_layers, num_blocks, num_kv_heads, block_size, head_dim)
            self.keys, self.values = (self._memory.zeros(shape, dtype, device).transpose(2, 3) for _ in range(2))
            return
        # Zeros, not garbage: a masked NaN would still poison the weighted sum.
        self.keys, self.values = (self._memory.zeros(self.shape, dtype, device) for _ in range(2))
        self.key_rows = list(self.keys.view(num_layers, num_blocks * block_size, num_kv_heads, head_dim))
        self.value_rows = list(self.values.view(num_layers, num_blocks * block_size, num_kv_heads, head_dim))
        self.key_blocks = list(self.keys.view(num_layers, num_blocks, -1))
        self.value_blocks = list(self.values.view(num_layers, num_blocks, -1))

    def copy_blocks(self, sources: NDArray[np.int64], destinations: NDArray[np.int64]) -> None:
        source, destination = (to_device(blocks, self.keys.device) for blocks in (sources, destinations))
        for cache in (self.keys, self.values):
            # As it lies: where PyTorch has to be deterministic, it would copy all of a cache that is not contiguous.
            whole = cache if cache.is_contiguous() else cache.transpose(2, 3)
            whole.index_copy_(1, destination, whole.index_select(1, source))

    def clear(self) -> None:
        if not self.is_released:
            self.keys.zero_()
            self.values.zero_()

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def release(self) -> None:
        """Until `reacquire` nothing may be computed."""
        assert not self.is_released
        self._memory.release()
        self.is_released = True

    def reacquire(self) -> None:
        """Nothing is cached any more."""
        assert self.is_released
        self._memory.reacquire()
        self.is_released = False
        self.clear()

    def gather(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of these blocks, end to end, in buffers that the next call overwrites."""
        _, _, block_size, num_kv_heads, head_dim = self.shape
        block_elements = block_size * num_kv_heads * head_dim
        needed = len(blocks) * block_elements
        # Fresh memory for every gather would cost more in page faults than the copy itself.
        if needed > len(self._gathered[0]):
            self._gathered = (self.keys.new_empty(needed), self.values.new_empty(needed))
        keys, values = (buffer[:needed].view(len(blocks), block_elements) for buffer in self._gathered)
        torch.index_select(self.key_blocks[layer], 0, blocks, out=keys)
        torch.index_select(self.value_blocks[layer], 0, blocks, out=values)
        return keys, values


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Without waiting for what a GPU still has to do."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
