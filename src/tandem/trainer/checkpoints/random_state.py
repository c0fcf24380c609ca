"""The random number generators of one process, as JSON: Python's, NumPy's, torch's on the CPU and on its GPU."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def capture_random_state(device: torch.device) -> dict[str, Any]:
    name, keys, position, has_gauss, cached_gaussian = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached_gaussian],
        "torch": _to_hex(torch.get_rng_state()),
        "cuda": _to_hex(torch.cuda.get_rng_state(device)) if device.type == "cuda" else None,
    }


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    version, words, gauss_next = state["python"]
    random.setstate((version, tuple(words), gauss_next))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_from_hex(state["torch"]))
    # A run that goes on on another kind of device has no state for it: the seed it was started with stays.
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(_from_hex(state["cuda"]), device)


def seed_random_state(seed: int) -> None:
    """A state of its own for a process that has none to go on from."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _to_hex(state: Tensor) -> str:
    return state.numpy().tobytes().hex()


def _from_hex(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
