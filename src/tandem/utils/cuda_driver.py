"""CUDA's driver, called by its C names, for what PyTorch has no function for.

Used by the weights that processes share (weights/cuda_ipc.py) and by the engine's KV cache
(engine/mapped_memory.py). Torch-free; the driver is loaded at the first call.
"""

import ctypes
import functools
from typing import Any


class DriverError(OSError):
    """The driver refused a call."""


def call_driver(name: str, *arguments: Any) -> None:
    """DriverError where it fails, in the driver's words; OSError where there is no driver."""
    status = getattr(_driver(), name)(*arguments)
    if status:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(ctypes.c_int(status), ctypes.byref(text))
        reason = (text.value or b"unknown error").decode()
        raise DriverError(f"{name} of the CUDA driver: error {status}, {reason}")


@functools.cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


class DeviceBytes:
    """Memory of a GPU that is not PyTorch's own: `torch.as_tensor` makes a tensor of bytes of it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip
