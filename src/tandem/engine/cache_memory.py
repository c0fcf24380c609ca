"""Memory of the KV cache, which a trainer in the same process may have while it computes gradients
(`deployment = "colocated"`).

Tensors stay what they are: what is released is what they point to. On a GPU they keep their addresses, so that CUDA
graphs stay true (`mapped_memory.py`).
"""

from typing import Protocol

import torch
from torch import Tensor


class CacheMemory(Protocol):
    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor: ...

    def release(self) -> None:
        """Nobody may touch the tensors until `reacquire`; what was in them is lost."""
        ...

    def reacquire(self) -> None:
        """What is in the tensors is arbitrary."""
        ...


class StorageMemory:
    """Through PyTorch's storages, which then lie somewhere else."""

    def __init__(self) -> None:
        self._storages: list[tuple[torch.UntypedStorage, int]] = []

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        storage = tensor.untyped_storage()
        self._storages.append((storage, storage.nbytes()))
        return tensor

    def release(self) -> None:
        for storage, _ in self._storages:
            storage.resize_(0)

    def reacquire(self) -> None:
        for storage, num_bytes in self._storages:
            storage.resize_(num_bytes)
