"""Weights through the memory of a GPU that trainer and server share (`deployment = "shared"`), by CUDA IPC.

    trainer   optimizer ─► copy, rounded ─► announced.json names its handle
    server    opens the handle ─► copies ─► closes it ─► swaps between two steps

A handle is 64 bytes that the driver checks; whoever reads it unpickles nothing. There is one copy: the next version is
written over it. So its first bytes say which version it is, nothing while it is being written, and a reader looks at
them before and after.
"""

import ctypes
import logging
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tandem.utils.cuda_driver import DeviceBytes, call_driver
from tandem.weights.shared_memory import HEADER_BYTES, SharedMemory
from tandem.weights.versions import Place
from tandem.weights.ways import HeldVersion, Tensors, Way, cast_each, each, held_dtype

logger = logging.getLogger(__name__)
HANDLE = re.compile(r"cuda:([0-9a-f]{128})\+(\d+)")
HANDLE_BYTES = 64
ALIGNED_BYTES = 256
OPEN_PEERS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is
NO_VERSION = -1


class Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * HANDLE_BYTES)]


class DeviceMemory:
    """The trainer's side, on the GPU that it computes on; memory of the machine where CUDA IPC does not work."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        self._buffer: Tensor | None = None
        self._place: Place | None = None
        self._views: dict[str, Tensor] = {}
        self._host: SharedMemory | None = None

    def hold(self, tensors: Tensors, version: int, adapter_config: Mapping[str, Any] | None) -> HeldVersion:
        dtype = held_dtype(self.dtype, adapter_config)
        if self._buffer is None and self._host is None:
            tensors = dict(cast_each(tensors, dtype))
            self._allocate(tensors, dtype)
        if self._host is not None:
            return self._host.hold(tensors, version, adapter_config)
        self._write_version(NO_VERSION)
        for name, tensor in each(tensors):
            self._views[name].copy_(tensor.detach())
        self._write_version(version)
        return HeldVersion(version, self._views, adapter_config, self._place)

    def _allocate(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        layout: dict[str, list[Any]] = {}
        end = ALIGNED_BYTES
        for name, tensor in tensors.items():
            layout[name] = [str(dtype).removeprefix("torch."), list(tensor.shape), end]
            end += -(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
        buffer = torch.empty(end, dtype=torch.uint8, device=self.device)
        try:
            self._place = Place(export_handle(buffer), layout)
        except OSError as error:
            logger.warning("no CUDA IPC (%s): weights go through the memory of the machine", error)
            self._host = SharedMemory(self.dtype)
        else:
            self._buffer, self._views = buffer, views_of(buffer, layout)

    def _write_version(self, version: int) -> None:
        assert self._buffer is not None
        self._buffer[:HEADER_BYTES].view(torch.int64).fill_(version)
        torch.cuda.current_stream(self.device).synchronize()


def read_device(place: Place, version: int, device: torch.device) -> dict[str, Tensor]:
    """The engine's side: a copy of the tensors that another process holds on this GPU."""
    found = HANDLE.fullmatch(place.path)
    if found is None or device.type != "cuda":
        raise ValueError(f"{place.path!r} is no place in the memory of {device.type}")
    with opened(bytes.fromhex(found[1]), int(found[2]), device) as memory:
        _require(memory, version)
        copy = memory[: _end(place)].clone()
        _require(memory, version)  # waits for the copy
    return views_of(copy, place.tensors)


def _require(memory: Tensor, version: int) -> None:
    if len(memory) < HEADER_BYTES:
        raise ValueError("the memory has no version")
    found = memory[:HEADER_BYTES].view(torch.int64).item()
    if found != version:
        raise ValueError(f"the memory holds version {found} by now, not {version}")


def _end(place: Place) -> int:
    ends = [at + math.prod(shape) * getattr(torch, dtype).itemsize for dtype, shape, at in place.tensors.values()]
    return max(ends, default=HEADER_BYTES)


def views_of(memory: Tensor, layout: Mapping[str, list[Any]]) -> dict[str, Tensor]:
    """Raises ValueError where a tensor does not lie within the memory."""
    views = {}
    for name, (dtype, shape, at) in layout.items():
        wanted = getattr(torch, dtype)
        end = at + math.prod(shape) * wanted.itemsize
        if not 0 <= at <= end <= len(memory):
            raise ValueError(f"{name} lies outside of the memory")
        views[name] = memory[at:end].view(wanted).view(shape)
    return views


def export_handle(buffer: Tensor) -> str:
    """Where another process finds this memory: the handle of the allocation it is part of, and where it begins there.
    Raises OSError where the driver has none."""
    torch.cuda.current_stream(buffer.device).synchronize()  # a thread has a context once it has used the device
    base, _ = _allocation(buffer.data_ptr())
    handle = Handle()
    call_driver("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(buffer.data_ptr()))
    return f"cuda:{bytes(handle.reserved).hex()}+{buffer.data_ptr() - base}"


@contextmanager
def opened(handle: bytes, offset: int, device: torch.device) -> Iterator[Tensor]:
    """The bytes of another process's allocation, from `offset` on. Not to be used afterwards."""
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).synchronize()
        pointer = ctypes.c_uint64()
        call_driver(
            "cuIpcOpenMemHandle_v2", ctypes.byref(pointer), Handle.from_buffer_copy(handle), ctypes.c_uint(OPEN_PEERS)
        )
        try:
            _, size = _allocation(pointer.value)
            if offset > size:
                raise ValueError(f"offset {offset} lies outside of the memory")
            yield torch.as_tensor(DeviceBytes(pointer.value + offset, size - offset), device=device)
            torch.cuda.current_stream(device).synchronize()
        finally:
            call_driver("cuIpcCloseMemHandle", pointer)


def _allocation(pointer: int) -> tuple[int, int]:
    """Where the allocation begins that a pointer lies in, and its size."""
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    call_driver("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(pointer))
    return base.value, size.value


WAY = Way(deployment="shared", devices=("cuda",), prefix="cuda:", sink=DeviceMemory, read=read_device)
