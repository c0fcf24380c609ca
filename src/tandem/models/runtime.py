"""Device, threads, determinism, and tensors that are divided: the same for everything that runs a model."""

import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tandem.config.shared import Device
from tandem.utils.errors import UserError
from tandem.utils.processes import usable_cores

P = ParamSpec("P")
T = TypeVar("T")


def choose_device(device: Device) -> torch.device:
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda', but no GPU is visible; set it to 'cpu' or 'auto'")
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


def setup_torch(*, threads: int | None, seed: int, deterministic: bool) -> None:
    """Called once, before the first tensor. Ranks on one machine share its cores."""
    local_world_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if threads is None and local_world_size > 1:
        threads = max(1, usable_cores() // local_world_size)
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    # The first call of each of these chooses code for the processor. Two threads that choose at once may get the
    # inaccurate one, wrong in the fourth decimal: so the choice is made here, by one.
    for function in (torch.cos, torch.sin, torch.exp, torch.log):
        function(torch.ones(1))
    if deterministic:
        # cuBLAS reads this when it starts; without it, it may add up in another order each time.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if deterministic == torch.are_deterministic_algorithms_enabled():
        return
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(deterministic)
        # Nothing of ours reads memory before it has written it, and filling all of it takes its time.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    else:  # the same but for the compiler, which need not be imported then: that takes two seconds
        torch.set_deterministic_debug_mode("error" if deterministic else "default")


def in_own_thread(function: Callable[P, T]) -> Callable[P, T]:
    """Let the function run in a thread that ends with it, so that it leaves no other threads behind.

    OpenMP keeps workers for each thread that has ever computed in parallel, as long as it lives. Where that made more
    of them than cores, they went to sleep after every operation, and decoding took a third longer (docs/log.md). For
    whatever computes in the background of the thread that runs the model, such as loading it.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function, *args, **kwargs).result()

    return run


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Without waiting for what a GPU still has to do."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    # By numpy: PyTorch copies by many threads, and waking those has taken 12 ms.
    np.copyto(pinned.numpy(), array)
    return pinned.to(device, non_blocking=True)


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be divided among ranks, without its history. Every rank has to ask."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor.detach() if gather is None else gather().detach()
