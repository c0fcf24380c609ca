"""Weights through memory that two processes of a machine share (`deployment = "shared"` on a CPU). Linux only.

It has no name in any folder: other processes of the same user reach it by the trainer's descriptors, and it ends with
the last process that uses it, however that ends. The server maps it without copying it.
"""

import math
import mmap
import os
import re
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tandem.utils.files import open_regular
from tandem.weights.versions import Place
from tandem.weights.ways import HeldVersion, Tensors, Way, cast_each, held_dtype

KEPT = 2  # versions: one may be read while the next one is published
DESCRIPTOR = re.compile(r"/proc/\d+/fd/\d+")
HEADER_BYTES = 8  # the version: a descriptor that is closed may become another one's


class SharedMemory:
    """The trainer's side."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._descriptors: deque[int] = deque()

    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        descriptor = os.memfd_create(f"tandem weights {version}")
        dtype = held_dtype(self.dtype, adapter_config)
        layout: dict[str, list[Any]] = {}
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(version.to_bytes(HEADER_BYTES, "little"))
            for name, tensor in cast_each(tensors, dtype):
                layout[name] = [str(dtype).removeprefix("torch."), list(tensor.shape), file.tell()]
                file.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._descriptors.append(descriptor)
        while len(self._descriptors) > KEPT:
            os.close(self._descriptors.popleft())
        place = Place(f"/proc/{os.getpid()}/fd/{descriptor}", layout)
        return HeldVersion(version, read_shared(place, version), adapter_config, place)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popleft())


def read_shared(place: Place, version: int) -> dict[str, Tensor]:
    """The engine's side: the tensors that another process holds there; nothing is copied. Raises OSError or ValueError
    where they are no longer."""
    if not DESCRIPTOR.fullmatch(place.path):
        raise ValueError(f"{place.path!r} is no place in memory")
    with open_regular(Path(place.path)) as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    found = int.from_bytes(memory[:HEADER_BYTES], "little")
    if found != version:
        raise ValueError(f"{place.path} holds version {found} by now, not {version}")
    tensors = {}
    for name, (dtype, shape, offset) in place.tensors.items():
        count = math.prod(shape)
        tensors[name] = torch.frombuffer(memory, dtype=getattr(torch, dtype), count=count, offset=offset).view(shape)
    return tensors


WAY = Way(
    deployment="shared",
    devices=("cpu",),
    prefix="/proc/",
    sink=lambda dtype, device: SharedMemory(dtype),
    read=lambda place, version, device: read_shared(place, version),
)
