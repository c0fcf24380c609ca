"""Memory of a GPU that can be given back to it while its addresses stay reserved, by CUDA's virtual memory functions.

    reserve addresses ─► map memory to them ─► … ─► unmap and free it ─► … ─► map other memory to the same addresses

CUDA graphs hold addresses, so they stay true. PyTorch has no such memory of its own that can be released by hand.
"""

import ctypes
from ctypes import byref, c_int, c_size_t, c_ubyte, c_ulonglong, c_ushort, c_void_p
from typing import Any

import torch
from torch import Tensor

from tandem.utils.cuda_driver import DeviceBytes, DriverError, call_driver

PINNED, ON_DEVICE, READ_WRITE = 1, 1, 3  # as cuda.h numbers them


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Flags(ctypes.Structure):
    _fields_ = (("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4))


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", c_int))


class MappedMemory:
    """Each tensor has addresses of its own, which are reserved for as long as the process lives."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.synchronize(device)  # CUDA's own context is there from now on
        location = _Location(ON_DEVICE, index)
        self._kind = _Allocation(PINNED, 0, location, None, _Flags())
        self._access = _Access(location, READ_WRITE)
        granularity = c_size_t()
        self._call("cuMemGetAllocationGranularity", byref(granularity), byref(self._kind), c_int(0))
        self._granularity = granularity.value
        self._mapped: list[tuple[int, int]] = []  # where, and how many bytes
        self._handles: list[int] = []

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        count = torch.Size(shape).numel()
        num_bytes = -(-count * dtype.itemsize // self._granularity) * self._granularity
        address = c_ulonglong()
        self._call(
            *("cuMemAddressReserve", byref(address), c_size_t(num_bytes), c_size_t(0), c_ulonglong(0), c_ulonglong(0))
        )
        self._mapped.append((address.value, num_bytes))
        self._map(address.value, num_bytes)
        return (
            torch.as_tensor(DeviceBytes(address.value, count * dtype.itemsize), device=device)
            .view(dtype)
            .view(shape)
            .zero_()
        )

    def release(self) -> None:
        torch.cuda.synchronize(self.device)
        for (address, num_bytes), handle in zip(self._mapped, self._handles, strict=True):
            self._call("cuMemUnmap", c_ulonglong(address), c_size_t(num_bytes))
            self._call("cuMemRelease", c_ulonglong(handle))
        self._handles.clear()

    def reacquire(self) -> None:
        for address, num_bytes in self._mapped:
            self._map(address, num_bytes)

    def _map(self, address: int, num_bytes: int) -> None:
        handle = c_ulonglong()
        self._call("cuMemCreate", byref(handle), c_size_t(num_bytes), byref(self._kind), c_ulonglong(0))
        self._call("cuMemMap", c_ulonglong(address), c_size_t(num_bytes), c_size_t(0), handle, c_ulonglong(0))
        self._call("cuMemSetAccess", c_ulonglong(address), c_size_t(num_bytes), byref(self._access), c_size_t(1))
        self._handles.append(handle.value)

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            call_driver(name, *arguments)
        except DriverError as error:
            free, _ = torch.cuda.mem_get_info(self.device)
            raise RuntimeError(f"{error} (the KV cache; {free / 2**30:.1f} GiB of the GPU are free)") from error
